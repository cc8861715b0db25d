"""The runs of a sweep: which there are, how each is trained, and what counts as done."""

import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from schoenbat.data.cache import read_manifest
from schoenbat.data.errors import DataError
from schoenbat.registry import build_attention
from schoenbat.training.options import check_timing, default_precision
from schoenbat.training.protocol import OF_WHOLE_RUNS, Protocol
from schoenbat.training.record import (
    NOT_SETTINGS,
    RESULT,
    TIMED_STEPS,
    WARM_STEPS,
    RunResult,
    read_result,
    run_directory,
)

GRACE = 20.0
"""Seconds that a run has to save its checkpoint once it was asked to end."""
# What a sweep says itself to `lra train`.
_OWN_OPTIONS = ("task", "attention", "seed", "data", "out", "resume", "timing", "shared-device")
FLAGS = {
    "compile": ("compiled", "true"),
    "no-compile": ("compiled", "false"),
    "keep-zeros": ("hide_zeros", "false"),
}
"""Options of `lra train` without a value, and what its results call them."""


@dataclass(frozen=True)
class Cell:
    """One training run of a sweep.

    >>> str(Cell("text", "softmax", 2))
    'text softmax seed 2'
    """

    task: str
    attention: str
    seed: int
    timing: bool = False

    def directory(self, out: Path) -> Path:
        return run_directory(out, self.task, self.attention, self.seed, timing=self.timing)

    def __str__(self) -> str:
        return f"{self.task} {self.attention} {'timing' if self.timing else f'seed {self.seed}'}"


@dataclass(frozen=True)
class SweepOptions:
    """What a sweep trains and how.

    >>> SweepOptions(("text",), ("softmax",), seeds=0)
    Traceback (most recent call last):
    ...
    ValueError: a sweep needs at least 1 seed, got 0
    """

    tasks: tuple[str, ...]
    attentions: tuple[str, ...]
    seeds: int = 1
    """Seeds 0 to ``seeds - 1``."""
    jobs: int = 1
    """How many runs at once."""
    budget: float = math.inf
    """Seconds after which everything has ended, `GRACE` included."""
    timing: bool = False
    """Time every task and attention once instead of training."""
    data: Path = Path("data")
    out: Path = Path("runs")
    known: Path | None = None
    """A file of gathered runs: what is in it is done."""
    train_options: tuple[tuple[str, str], ...] = ()
    """Further options of ``lra train``, as names without dashes and values; flags have the value ``""``."""

    def __post_init__(self) -> None:
        for name, count in [("seed", self.seeds), ("job", self.jobs)]:
            if count < 1:
                raise ValueError(f"a sweep needs at least 1 {name}, got {count}")
        for task in self.tasks:
            steps = self.steps(task)
            if self.timing:
                check_timing(steps)
        for attention in self.attentions:
            build_attention(attention, head_dim=32, num_heads=2, max_length=64)
        for name, _ in self.train_options:
            if name in _OWN_OPTIONS:
                raise ValueError(f"train option {name!r} is the sweep's own to set; leave it out")

    @property
    def parallel(self) -> int:
        """How many runs at once; on a GPU those that are timed take turns (see `turns`), a CPU has one."""
        return 1 if self.timing and not torch.cuda.is_available() else self.jobs

    def steps(self, task: str) -> int:
        """How many steps a run of ``task`` is trained: those that were given, else the published ones."""
        given = dict(self.train_options).get("steps")
        if given is None:
            return Protocol.paper(task).steps
        if not given.isdecimal():
            raise ValueError(f"train option steps is a whole number, got {given!r}")
        return Protocol.paper(task, steps=int(given)).steps

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that a whole first seed comes before a second one.

        >>> [str(cell) for cell in SweepOptions(("text", "image"), ("softmax",), seeds=2).cells]
        ['text softmax seed 0', 'image softmax seed 0', 'text softmax seed 1', 'image softmax seed 1']
        """
        return [
            Cell(task, attention, seed, self.timing)
            for seed in range(1 if self.timing else self.seeds)
            for task in dict.fromkeys(self.tasks)
            for attention in dict.fromkeys(self.attentions)
        ]


def parse_train_option(text: str) -> tuple[str, str]:
    """Name and value of an option that is handed on to ``lra train``; a flag has no value.

    >>> parse_train_option("batch-size=16"), parse_train_option("keep-zeros")
    (('batch-size', '16'), ('keep-zeros', ''))
    """
    name, _, value = (part.strip() for part in text.partition("="))
    name = name.removeprefix("--").replace("_", "-")
    if not name or bool(value) == (name in FLAGS):
        *flags, last = FLAGS
        raise ValueError(
            f"train option {text!r} is neither a name with a value, as in steps=1000, nor "
            f"{', '.join(flags)} or {last}"
        )
    return name, value


def train_command(cell: Cell, options: SweepOptions) -> list[str]:
    """The command that trains one cell.

    >>> options = SweepOptions(("text",), ("softmax",), jobs=2, train_options=(("steps", "10"),))
    >>> " ".join(train_command(options.cells[0], options)[5:])
    '--task text --attention softmax --seed 0 --data data --out runs --resume --shared-device --steps 10'
    """
    command = [sys.executable, "-m", "schoenbat.cli", "lra", "train"]
    named = {"task": cell.task, "attention": cell.attention, "seed": cell.seed}
    for name, value in {**named, "data": options.data, "out": options.out}.items():
        command += [f"--{name}", str(value)]
    # A run that is only timed keeps no checkpoint.
    command.append("--timing" if cell.timing else "--resume")
    if options.jobs > 1 and not cell.timing:
        command.append("--shared-device")
    for name, value in options.train_options:
        command += [f"--{name}"] if name in FLAGS else [f"--{name}", value]
    return command


def is_known(cell: Cell, options: SweepOptions, known: Iterable[RunResult]) -> bool:
    """Whether one of the ``known`` results is what the sweep asks of the cell, and says how the test went.

    Times of another GPU than this machine's do not count.
    """
    wanted = _wanted(cell, options)
    device = torch.cuda.get_device_name() if cell.timing and torch.cuda.is_available() else None
    return any(
        result.timing == cell.timing
        and (result.record.best is None or result.record.best.test is not None)
        and device in (None, result.device)
        and _difference(result, wanted) is None
        for result in known
    )


def why_unknown(cell: Cell, options: SweepOptions, known: Iterable[RunResult]) -> str | None:
    """How the ``known`` run of a cell differs from what the sweep asks of it; None where there is none."""
    wanted = _wanted(cell, options)
    own = {name: wanted[name] for name in ("task", "attention", "seed")}
    runs = [result for result in known if result.timing == cell.timing and _difference(result, own) is None]
    return next((found for result in runs if (found := _difference(result, wanted))), None)


def is_done(cell: Cell, options: SweepOptions) -> bool:
    """Whether the cell has a readable result that was trained with what the sweep asks for."""
    try:
        return disagreement(read_result(cell.directory(options.out) / RESULT), cell, options) is None
    except ValueError:
        return False


def disagreement(result: RunResult, cell: Cell, options: SweepOptions) -> str | None:
    """How a result was trained otherwise than the sweep asks for, None where it was not."""
    return _difference(result, _wanted(cell, options))


def _wanted(cell: Cell, options: SweepOptions) -> dict[str, str]:
    """What a result of the cell says, by name."""
    wanted = {"task": cell.task, "attention": cell.attention, "seed": str(cell.seed)}
    for name, value in options.train_options:
        known, value = FLAGS.get(name, (name.replace("-", "_"), value))
        if known not in NOT_SETTINGS:
            wanted[known] = value
    given = dict(options.train_options)
    wanted.setdefault("precision", default_precision(given.get("accelerator", "auto")))
    # What was not given is as published.
    for name, value in asdict(Protocol.paper(cell.task, steps=options.steps(cell.task))).items():
        if not isinstance(value, tuple):
            wanted.setdefault(name, str(value))
    if cell.timing:
        # A run that is timed does not take all its steps.
        wanted = {name: value for name, value in wanted.items() if name not in OF_WHOLE_RUNS}
        wanted["timed_steps"] = str(min(TIMED_STEPS, options.steps(cell.task) - WARM_STEPS))
    with suppress(DataError):  # what cannot be read is the run's own to complain about
        wanted["data"] = read_manifest(options.data / cell.task).fingerprint
    return wanted


def _difference(result: RunResult, wanted: Mapping[str, str]) -> str | None:
    recorded = result.settings | asdict(result.record)
    for name in wanted:
        if name == "timed_steps" and recorded[name] >= int(wanted[name]):
            continue
        if name in recorded and not _same_value(recorded[name], wanted[name]):
            return f"{name} {recorded[name]}, not {wanted[name]}"
    return None


def _same_value(recorded: Any, text: str) -> bool:
    """Whether an option that was written as ``text`` has the value ``recorded``."""
    try:
        return float(recorded) == float(text)
    except (TypeError, ValueError):
        return str(recorded).lower() == text.lower()
