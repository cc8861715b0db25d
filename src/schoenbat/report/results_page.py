"""RESULTS.md: what the paper says beside what was measured, from result files and a page that people wrote.

The page is results.md.in beside this file. What stands between its markers is made here, from files alone:
the same files give the same page.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from schoenbat.experiments.error import ErrorRow
from schoenbat.experiments.groups import GROUPS
from schoenbat.experiments.speed import SpeedRow
from schoenbat.experiments.theorems import BiasRow, FormulaRow, KernelRow, RestoringRow, TailRow
from schoenbat.report import arena, numerical
from schoenbat.report.lra import LraTable, tabulate
from schoenbat.report.markdown import from_rich
from schoenbat.report.pages import fill
from schoenbat.report.tables import translation_table
from schoenbat.report.theorems import theorem_tables
from schoenbat.training.gathered import read_runs
from schoenbat.training.record import RunResult
from schoenbat.translation.record import EpochRow

TEMPLATE = "results.md.in"
ARENA = "lra.json"


@dataclass(frozen=True)
class Files:
    """Where results lie, and from where the page links to them."""

    results: Path = Path("results")
    home: Path = Path()
    """The page's own directory."""

    def link(self, path: Path) -> str:
        """
        >>> Files(Path("a/results"), Path("a")).link(Path("a/results/error.json"))
        '[results/error.json](results/error.json)'
        """
        relative = self._relative(path)
        return f"[{relative}]({quote(relative)})"

    def figure(self, path: Path, what: str) -> Iterator[str]:
        """The plot beside a result file, where there is one."""
        if path.with_suffix(".svg").exists():
            yield f"![{what}]({quote(self._relative(path.with_suffix('.svg')))})"

    def _relative(self, path: Path) -> str:
        return Path(os.path.relpath(path, self.home)).as_posix()


@dataclass(frozen=True)
class Section:
    """A part of the page that is made from one result file."""

    file: str
    command: str
    """What writes the file."""
    show: Callable[[Files, Path], Iterator[str]]
    """Its paragraphs."""
    paper: Callable[[LraTable], str] | None = None
    """The table that the paper fills alone."""

    def text(self, files: Files) -> str:
        path = files.results / self.file
        if path.exists():
            try:
                return "\n\n".join(self.show(files, path))
            except (KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f"{path} is not what {self.command!r} writes ({error!r}); write it again"
                ) from error
        missing = f"Not run yet: `{self.command}`."
        return f"{missing}\n\n{self.paper(tabulate([]))}" if self.paper else missing


def make_page(files: Files) -> str:
    """All of RESULTS.md."""
    page = resources.files("schoenbat.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    shown = {name: section.text(files) for name, section in SECTIONS.items()}
    return fill(page, {"identity": arena.identity_table()} | shown)


def _show_error(files: Files, path: Path) -> Iterator[str]:
    rows = [ErrorRow(**row) for row in _read(path)["rows"]]
    yield _provenance(files, path)
    yield numerical.claims_table(numerical.error_claims(rows), "here, with the paper's map")
    yield numerical.error_table(rows)
    yield from files.figure(path, "error against D")


def _show_speed(files: Files, path: Path) -> Iterator[str]:
    rows = [SpeedRow(**row) for row in _read(path)["rows"]]
    yield _provenance(files, path)
    yield numerical.claims_table(numerical.speed_claims(rows))
    yield numerical.speed_table(rows)
    yield from files.figure(path, "speed-up against D")


def _show_lengths(files: Files, path: Path) -> Iterator[str]:
    content = _read(path)
    yield _provenance(files, path)
    yield numerical.length_table([SpeedRow(**row) for row in content["rows"]], content["options"])


def _show_accuracies(files: Files, path: Path) -> Iterator[str]:
    runs, results = _read_runs(path)
    yield _runs_provenance(files, path, runs)
    yield arena.accuracy_table(results)
    if far := list(arena.far_from_paper(results)):
        yield f"Further than {arena.CLOSE:g} points from what the paper prints of the same attention:"
        yield _bullets(far)
    if last := arena.last_step_table(results):
        yield "The same runs after their last step, none of them chosen by its validation accuracy:"
        yield last
    if results.notes:
        yield "What was left out, or is not alike:"
        yield _bullets(results.notes)


def _show_costs(files: Files, path: Path) -> Iterator[str]:
    _, results = _read_runs(path)
    device = f"on {results.timed_on}" if results.timed_on else "(not timed yet)"
    yield f"Time of a training step {device}, over that of softmax with its scores formed:"
    yield arena.time_table(results)
    if beside := arena.sdpa_table(results):
        yield "Milliseconds of the same step, and in brackets its share of what SDPA takes:"
        yield beside
    yield "Peak memory of a training step, ours in MiB and the paper's in MB:"
    yield arena.memory_table(results)


def _show_ablation(files: Files, path: Path) -> Iterator[str]:
    runs, own = _read_runs(path)
    yield _runs_provenance(files, path, runs)
    if own.notes:
        yield _bullets(own.notes)
    # The times that all are divided by may lie with the other runs.
    runs += _arena_runs(files)
    yield arena.ablation_table(tabulate(run for run in runs if run.record.task == "text"))


def _show_tuning(files: Files, path: Path) -> Iterator[str]:
    runs, _ = _read_runs(path)
    yield _runs_provenance(files, path, runs)
    # Trials that were trained in full lie with the other runs; the choice saw their first seed.
    trained = [run for run in _arena_runs(files) if not run.timing and run.record.seed == 0]
    full = [run for run in trained if run.record.attention in GROUPS["tuning"].attentions.values()]
    if full:
        provenance = _runs_provenance(files, files.results / ARENA, full)
        yield f"Those with {full[0].record.steps:,} steps: {provenance}"
    yield arena.tuning_table([*runs, *full])


def _show_translation(files: Files, path: Path) -> Iterator[str]:
    yield _provenance(files, path, "last written by ")
    yield from_rich(translation_table([EpochRow(**row) for row in _read(path)["rows"]]))
    yield from files.figure(path, "loss, perplexity and BLEU by epoch")


def _show_theorems(files: Files, path: Path) -> Iterator[str]:
    yield _provenance(files, path)
    rows = [THEOREM_ROWS[row["check"]](**row) for row in _read(path)["rows"]]
    for shown in theorem_tables(rows):
        yield f"- {shown}." if isinstance(shown, str) else from_rich(shown)
    yield from files.figure(path, "bias and error bound against D")


THEOREM_ROWS: dict[str, type[Any]] = {
    "bias": BiasRow,
    "tail": TailRow,
    "kernels": KernelRow,
    "formula": FormulaRow,
    "restoring": RestoringRow,
}
SECTIONS = {
    "error": Section("error.json", "schoenbat error --out results", _show_error),
    "speed": Section("speed.json", "schoenbat speed --device cuda --out results", _show_speed),
    "cpu": Section("../benchmarks/results/cpu.json", "make bench", _show_lengths),
    "lra": Section(ARENA, "schoenbat lra sweep --group main", _show_accuracies, arena.accuracy_table),
    "costs": Section(ARENA, "schoenbat lra sweep --group main --timing", _show_costs, arena.time_table),
    "ablation": Section(
        "ablation.json", "schoenbat lra sweep --group ablation", _show_ablation, arena.ablation_table
    ),
    "translate": Section("translate.json", "schoenbat translate --out results", _show_translation),
    "theorems": Section("theorems.json", "schoenbat theorems --out results", _show_theorems),
    "tuning": Section("lra-tuning.json", "schoenbat lra sweep --group tuning", _show_tuning),
}
"""By the name of their markers."""


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no result file: {error}; write it again") from error


def _arena_runs(files: Files) -> list[RunResult]:
    """The runs of the comparisons, as far as there are any."""
    path = files.results / ARENA
    return read_runs(path)[0] if path.exists() else []


def _read_runs(path: Path) -> tuple[list[RunResult], LraTable]:
    runs, notes = read_runs(path)
    if not runs:
        raise ValueError(f"{path} holds no runs; add some with: schoenbat lra gather --into {path}")
    return runs, tabulate(runs, notes)


def _provenance(files: Files, path: Path, how: str = "") -> str:
    content = _read(path)
    where = f"{content['machine']['device']}, torch {content['versions']['torch']}"
    return f"{files.link(path)}: {how}`{content['command']}` on {where}, {content['finished'][:10]}."


def _runs_provenance(files: Files, path: Path, runs: Sequence[RunResult]) -> str:
    trained = [run for run in runs if not run.timing]
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    until = max(run.finished for run in runs)[:10]
    numbers = {"trained": len(trained), "only timed": len(runs) - len(trained)}
    counts = " and ".join(f"{number} {how}" for how, number in numbers.items() if number)
    return f"{files.link(path)}: runs, {counts}, on {devices}, the last of {until}."


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
