"""The Long Range Arena as tables for a terminal, and the same in Markdown."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.padding import Padding
from rich.table import Table

from schoenbat.experiments.groups import label_of
from schoenbat.report.lra import LEFT_CHANCE, NAIVE, SDPA, LraRow, LraTable, Spread
from schoenbat.report.markdown import NOT_MEASURED
from schoenbat.report.markdown import table as markdown_table
from schoenbat.report.tables import plain_table

_COST_CAPTION = (
    f"over naive, over SDPA: time over that of {NAIVE} and of {SDPA}; paper: the paper's time over its "
    "softmax and its memory; MiB: peak; times are those of runs with --timing"
)


def accuracy_table(table: LraTable) -> Table:
    """Accuracies for a terminal of 80 columns; `markdown` has all that is known."""
    shown = _terminal_table("Long Range Arena: accuracy on test in %", "n", "test", "last", "paper", "−")
    shown.caption = (
        "n: seeds; test: of the checkpoint with the best validation accuracy; ±: sample deviation over "
        "seeds; last: after the last step; −: test minus paper"
    )
    for rows in _sections(table):
        trained = [row for row in rows if row.accuracy or row.last_accuracy]
        if trained:
            _add_section(shown, [(row, _short_accuracy_cells(row)) for row in trained])
            for name, share in _floors(rows[0]):
                shown.add_row(f"  ({name})", "", f"{100 * share:.2f}")
            shown.add_section()
    return shown


def cost_table(table: LraTable) -> Table:
    """Time and memory for a terminal of 80 columns; `markdown` has all that is known."""
    headings = "ms", "/ naive", "paper", "/ SDPA", "MiB", "paper"
    shown = _terminal_table(_cost_title(table), *headings)
    shown.caption = _COST_CAPTION.replace("over naive, over SDPA", "/ naive, / SDPA")
    for rows in _sections(table):
        _add_section(shown, [(row, _cost_cells(row)[2:-1]) for row in rows if _has_cost(row)])
        shown.add_section()
    return shown


def _terminal_table(title: str, *headings: str) -> Table:
    table = plain_table(title)
    table.show_edge = table.pad_edge = False
    table.add_column("attention", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _add_section(table: Table, lines: Sequence[tuple[LraRow, Sequence[str]]]) -> None:
    """A task's name, and below it a line for each attention, by the name that people read."""
    if lines:
        table.add_row(lines[0][0].task, style="bold")
    for row, cells in lines:
        # A long name breaks between its options.
        name = re.sub(r",(?! )", ", ", label_of(row.attention))
        table.add_row(Padding(name, (0, 0, 0, 2)), *cells)


def markdown(table: LraTable) -> str:
    """Both tables and the notes as Markdown."""
    parts = [_accuracies(table).as_markdown(), _costs(table).as_markdown()]
    if table.notes:
        parts.append("".join(f"- {note}\n" for note in table.notes))
    return "\n".join(parts)


@dataclass(frozen=True)
class _Grid:
    """A table's words in Markdown: the first two columns are task and attention."""

    title: str
    headings: tuple[str, ...]
    sections: tuple[tuple[tuple[str, ...], ...], ...]
    caption: str

    def as_markdown(self) -> str:
        lines = [row for section in self.sections for row in section]
        rows = markdown_table(self.headings, lines, [column > 1 for column in range(len(self.headings))])
        return f"## {self.title}\n\n{rows}\n\n{self.caption}\n"


def _accuracies(table: LraTable) -> _Grid:
    headings = "task", "attention", "seeds", "steps", "test %", "last step %", "left 50 %", "paper %", "−"
    return _Grid(
        "Long Range Arena: accuracy on test",
        headings,
        tuple(
            (
                *(_accuracy_cells(row) for row in rows if row.accuracy or row.last_accuracy),
                *_floor_cells(rows[0], len(headings)),
            )
            for rows in _sections(table)
            if any(row.accuracy or row.last_accuracy for row in rows)
        ),
        "test: of the checkpoint with the best validation accuracy; ±: sample deviation over seeds; "
        f"left 50 %: share of seeds above {LEFT_CHANCE:.0%}; −: test minus paper",
    )


def _short_accuracy_cells(row: LraRow) -> tuple[str, ...]:
    last = None if row.last_accuracy is None else row.last_accuracy.mean
    return (
        str(row.seeds or ""),
        percent(row.accuracy),
        number(last, ".2f", 100),
        number(row.paper_accuracy, ".2f", 100),
        _difference(row),
    )


def _difference(row: LraRow) -> str:
    if not row.accuracy or row.paper_accuracy is None:
        return ""
    return f"{100 * (row.accuracy.mean - row.paper_accuracy):+.2f}"


def _accuracy_cells(row: LraRow) -> tuple[str, ...]:
    return (
        row.task,
        row.attention,
        str(row.seeds or ""),
        f"{row.steps:,}" if row.steps else "",
        percent(row.accuracy),
        percent(row.last_accuracy),
        "" if row.left_chance is None else f"{row.left_chance:.0%}",
        number(row.paper_accuracy, ".2f", 100),
        _difference(row),
    )


def _floor_cells(row: LraRow, width: int) -> Iterator[tuple[str, ...]]:
    for name, share in _floors(row):
        yield row.task, f"({name})", "", "", f"{100 * share:.2f}", *[""] * (width - 5)


def _floors(row: LraRow) -> Iterator[tuple[str, float]]:
    """What is reached without reading; averages have no such share."""
    for name, share in (("most frequent label", row.majority), ("citation count alone", row.citations)):
        if share is not None:
            yield name, share


def _costs(table: LraTable) -> _Grid:
    return _Grid(
        _cost_title(table),
        ("task", "attention", "ms", "over naive", "paper", "over SDPA", "MiB", "paper MB", "parameters"),
        tuple(tuple(_cost_cells(row) for row in rows if _has_cost(row)) for rows in _sections(table)),
        _COST_CAPTION,
    )


def _cost_title(table: LraTable) -> str:
    device = f"on {table.timed_on}" if table.timed_on else "not timed"
    return f"Long Range Arena: a training step, {device}"


def _has_cost(row: LraRow) -> bool:
    return any(value is not None for value in (row.parameters, row.time_over_naive, row.time_over_sdpa))


def _cost_cells(row: LraRow) -> tuple[str, ...]:
    return (
        row.task,
        row.attention,
        number(row.step_seconds, ".2f", 1e3),
        number(row.time_over_naive, ".3f"),
        number(row.paper_time, ".3f"),
        number(row.time_over_sdpa, ".3f"),
        number(row.peak_memory, ",.0f", 2**-20),
        number(row.paper_memory, ",.0f"),
        number(row.parameters, ",.0f"),
    )


def _sections(table: LraTable) -> list[list[LraRow]]:
    rows = (*table.rows, *table.averages)
    return [[row for row in rows if row.task == task] for task in dict.fromkeys(row.task for row in rows)]


def percent(spread: Spread | None) -> str:
    if spread is None:
        return NOT_MEASURED
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.2f}"
    return f"{100 * spread.mean:.2f}{deviation}"


def number(value: float | None, form: str, factor: float = 1.0) -> str:
    return NOT_MEASURED if value is None else format(value * factor, form)
