"""What one training run leaves behind: where its files are, and the row of its result file."""

import json
import numbers
import os
import re
import subprocess  # nosec B404 - git is asked for the revision
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from schoenbat.training.protocol import OF_WHOLE_RUNS

EXPERIMENT = "lra-train"
RESULT = "result.json"
CHECKPOINT = "checkpoint.pt"
# Where several processes each write a part, it is a directory; its name ends in a number.
SHARDED_CHECKPOINT = "checkpoint-"
# In such a directory, what is not a part of weights or optimizer. It is written last.
SHARDED_REST = "run.pt"
LOG = "log.jsonl"
PART = ".part"
"""The ending of what is still being written, or being removed."""
# The first steps of a process compile, capture and allocate; they are trained but not timed.
WARM_STEPS = 10
# So many follow in a run that is only timed.
TIMED_STEPS = 200
# Steps whose time is taken together.
TIMED_BLOCK = 20
# Options that tell runs apart, or say where and not how they were trained.
NOT_SETTINGS = ("seed", "attention", "timing", "alone", "accelerator", "report_every", "checkpoint_seconds")


@dataclass(frozen=True)
class Accuracy:
    """The accuracies of the model as it was after ``step`` steps, as shares."""

    step: int
    validation: float
    test: float | None = None
    """None where it is not tested yet, or was found to be wrong."""


@dataclass(frozen=True)
class RunRecord:
    """The row of a result file. Times are those of training steps, without warm-up, compilation and
    evaluations; memory is without evaluations and data."""

    task: str
    attention: str
    seed: int
    steps: int
    """How many steps were trained."""
    best: Accuracy | None
    """Of the checkpoint with the best validation accuracy; None for a run that is only timed."""
    last: Accuracy | None
    majority: float
    """The accuracy on test of always answering the most frequent label."""
    parameters: int
    seconds: float
    """Of all timed steps; where a run is only timed, as if each took what one of the median block takes."""
    timed_steps: int
    peak_memory: int | None
    """Bytes at the peak of a training step, None where the device does not tell."""
    devices: int
    alone: bool
    """Whether nothing else was run on the device at the same time, as far as the run was told."""
    data: str
    """The fingerprint of the data."""
    revision: str | None
    """The git revision of the code, with "+" where files were changed."""
    citations: float | None = None
    """In Retrieval, the accuracy on test of knowing only how often the second paper is cited."""

    captured: bool = False
    """Whether a CUDA graph ran the steps."""

    @property
    def step_seconds(self) -> float | None:
        """None for a run that was over before the warm-up."""
        return self.seconds / self.timed_steps if self.timed_steps else None


@dataclass(frozen=True)
class RunResult:
    """A run's result file."""

    record: RunRecord
    options: Mapping[str, Any]
    device: str
    finished: str

    @property
    def timing(self) -> bool:
        """Whether the run was only timed."""
        return self.record.best is None

    @property
    def settings(self) -> dict[str, Any]:
        """The options by name, those that are grouped under a name of their own too."""
        return flattened(self.options)

    @property
    def way(self) -> str:
        """How it was trained and on what, as text: equal for runs that may be averaged or compared."""
        way = {name: value for name, value in self.settings.items() if name not in NOT_SETTINGS}
        way |= {"steps": self.record.steps, "data": self.record.data}
        if self.timing:
            way = {name: value for name, value in way.items() if name not in OF_WHOLE_RUNS}
            way |= {"captured": self.record.captured}
        return json.dumps(way, sort_keys=True, default=str)


def run_directory(out: Path, task: str, attention: str, seed: int, *, timing: bool = False) -> Path:
    """Where a run keeps its files; attentions with options become names that every file system takes.

    >>> run_directory(Path("runs"), "text", "schoenbat:kernel=1+x,causal=true", 0).as_posix()
    'runs/text/schoenbat+kernel=1%2Bx+causal=true/seed-0'
    """
    slug = re.sub(r"[:,]", "+", quote(attention, safe=":,="))
    return out / task / slug / ("timing" if timing else f"seed-{seed}")


def find_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint of a run, a file or a directory; None where there is none.

    >>> find_checkpoint(Path("runs") / "that" / "is" / "not" / "there")
    """
    written = {path: path for path in directory.glob(CHECKPOINT)}
    written |= {path.parent: path for path in directory.glob(f"{SHARDED_CHECKPOINT}*/{SHARDED_REST}")}
    whole = [path for path in written if path.suffix != PART]
    return max(whole, key=lambda path: _written_at(written[path]), default=None)


def _written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        # The run, which may be running, has just put a newer one in its place.
        return 0


def revision() -> str | None:
    """The git revision that this package is of, with "+" where it was changed since.

    Where the code was copied without its repository, the variable SCHOENBAT_REVISION may tell it.
    """
    if told := os.environ.get("SCHOENBAT_REVISION"):
        return told
    here = Path(__file__).parents[1]
    try:
        # An installed package may lie inside of somebody else's repository.
        _, revision, changes = (
            subprocess.run(  # nosec B603 B607 - constant words; git is where the user's PATH has it
                ["git", *words], cwd=here, capture_output=True, text=True, check=True
            ).stdout
            for words in (
                ["ls-files", "--error-unmatch", "__init__.py"],
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--", "."],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision.strip() + ("+" if changes else "")


def read_result(path: Path) -> RunResult:
    """The run that left the result file ``path``; ValueError where it is no such file or is damaged."""
    try:
        return parse_result(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not the result of a run: {error!r}") from error


def parse_result(results: Any) -> RunResult:
    """The run that a result file's content tells of; ValueError where it tells of none."""
    try:
        if results["experiment"] != EXPERIMENT:
            raise ValueError(f"its experiment is {results['experiment']!r}, not {EXPERIMENT!r}")
        (row,) = results["rows"]
        accuracies = {name: _accuracy(row[name]) for name in ("best", "last")}
        record = RunRecord(**{**row, **accuracies})
        return RunResult(record, dict(results["options"]), results["machine"]["device"], results["finished"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is incomplete: {error!r}") from error


def _accuracy(row: Any) -> Accuracy | None:
    if not row:
        return None
    accuracy = Accuracy(**row)
    for share in (accuracy.validation, accuracy.test):
        if share is not None and not isinstance(share, numbers.Real):
            raise TypeError(f"an accuracy is a number, not {share!r}")
    return accuracy


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, those inside of others too.

    >>> flattened({"seed": 0, "protocol": {"steps": 10}})
    {'seed': 0, 'steps': 10}
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= flattened(value) if isinstance(value, Mapping) else {name: value}
    return flat
