"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

from rich.table import Table

NOT_MEASURED = "–"


def table(heading: Sequence[str], lines: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Words to the left, figures to the right; a column of figures may have empty cells.

    >>> print(table(["n", "ms"], [["short", "1.5"], ["long", "–"]]))
    | n | ms |
    | --- | ---: |
    | short | 1.5 |
    | long | – |
    """
    lines = [list(line) for line in lines]
    right = right or [_is_numeric([line[i] for line in lines]) for i in range(len(heading))]
    rule = ["---:" if is_right else "---" for is_right in right]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *lines))


def from_rich(shown: Table) -> str:
    """A terminal's table, with its title before it and its caption after it.

    >>> from rich.table import Table
    >>> print(from_rich(Table("n", title="lengths")))
    **lengths**
    <BLANKLINE>
    | n |
    | --- |
    """
    # A hyphen at the end of a line divides a word.
    headings = [str(column.header).replace("-\n", "").replace("\n", " ").strip() for column in shown.columns]
    columns = [[str(cell) for cell in column.cells] for column in shown.columns]
    right = [
        column.justify == "right" or _is_numeric(cells)
        for column, cells in zip(shown.columns, columns, strict=True)
    ]
    lines = zip(*columns, strict=True)
    title, caption = (str(text).replace("\n", " ") if text else "" for text in (shown.title, shown.caption))
    parts = [f"**{title}**" if title else "", table(headings, lines, right), caption]
    return "\n\n".join(part for part in parts if part)


def _is_numeric(cells: Sequence[str]) -> bool:
    known = [cell.strip("*_(") for cell in cells if cell not in ("", NOT_MEASURED)]
    return bool(known) and all(cell.lstrip("+−-")[:1].isdigit() for cell in known)
