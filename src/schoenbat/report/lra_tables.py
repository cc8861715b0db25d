"""The Long Range Arena as tables for a terminal, and the same in Markdown."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from schoenbat.report.lra import LEFT_CHANCE, NAIVE, SDPA, LraRow, LraTable, Spread
from schoenbat.report.markdown import NOT_MEASURED
from schoenbat.report.markdown import table as markdown_table
from schoenbat.report.tables import plain_table


def accuracy_table(table: LraTable) -> Table:
    """Accuracies for a terminal of 100 columns."""
    return _accuracies(table).as_rich()


def cost_table(table: LraTable) -> Table:
    """Time and memory for a terminal of 100 columns."""
    return _costs(table).as_rich()


def markdown(table: LraTable) -> str:
    """Both tables and the notes as Markdown."""
    parts = [_accuracies(table).as_markdown(), _costs(table).as_markdown()]
    if table.notes:
        parts.append("".join(f"- {note}\n" for note in table.notes))
    return "\n".join(parts)


@dataclass(frozen=True)
class _Grid:
    """A table's words, for a terminal and for Markdown: the first two columns are task and attention."""

    title: str
    headings: tuple[str, ...]
    sections: tuple[tuple[tuple[str, ...], ...], ...]
    caption: str

    def as_rich(self) -> Table:
        table = plain_table(self.title)
        table.caption = self.caption
        table.add_column(self.headings[0], max_width=10)
        table.add_column(self.headings[1], overflow="fold")
        for heading in self.headings[2:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for section in self.sections:
            for index, (task, attention, *cells) in enumerate(section):
                # A long name breaks between its options.
                table.add_row("" if index else task, attention.replace(",", ", "), *cells)
            table.add_section()
        return table

    def as_markdown(self) -> str:
        headings = [heading.replace("\n", " ").strip() for heading in self.headings]
        lines = [row for section in self.sections for row in section]
        rows = markdown_table(headings, lines, [column > 1 for column in range(len(headings))])
        return f"## {self.title}\n\n{rows}\n\n{self.caption}\n"


def _accuracies(table: LraTable) -> _Grid:
    headings = (
        "task",
        "attention",
        "seeds",
        "steps",
        "test %",
        "last step\n%",
        "left\n50 %",
        "paper\n%",
        "−",
    )
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


def _accuracy_cells(row: LraRow) -> tuple[str, ...]:
    difference = None
    if row.accuracy and row.paper_accuracy is not None:
        difference = row.accuracy.mean - row.paper_accuracy
    return (
        row.task,
        row.attention,
        str(row.seeds or ""),
        f"{row.steps:,}" if row.steps else "",
        percent(row.accuracy),
        percent(row.last_accuracy),
        "" if row.left_chance is None else f"{row.left_chance:.0%}",
        NOT_MEASURED if row.paper_accuracy is None else f"{100 * row.paper_accuracy:.2f}",
        "" if difference is None else f"{100 * difference:+.2f}",
    )


def _floor_cells(row: LraRow, width: int) -> Iterator[tuple[str, ...]]:
    """What is reached without reading; averages have no such row."""
    for name, share in (("most frequent label", row.majority), ("citation count alone", row.citations)):
        if share is not None:
            yield row.task, f"({name})", "", "", f"{100 * share:.2f}", *[""] * (width - 5)


def _costs(table: LraTable) -> _Grid:
    device = f"on {table.timed_on}" if table.timed_on else "not timed"
    return _Grid(
        f"Long Range Arena: a training step, {device}",
        ("task", "attention", "ms", "over\nnaive", "paper", "over\nSDPA", "MiB", "paper\nMB", "parameters"),
        tuple(tuple(_cost_cells(row) for row in rows if _has_cost(row)) for rows in _sections(table)),
        f"over naive, over SDPA: time over that of {NAIVE} and of {SDPA}; paper: the paper's time over its "
        "softmax and its memory; MiB: peak",
    )


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
