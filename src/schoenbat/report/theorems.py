"""What the theorems' checks have found, as tables for a terminal of 100 columns and in words."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from schoenbat.experiments.theorems import BiasRow, FormulaRow, KernelRow, RestoringRow, Row, TailRow
from schoenbat.experiments.theorems.bias import QUANTITIES, decay
from schoenbat.experiments.theorems.kernels import HALF_SCALE
from schoenbat.experiments.theorems.tail import informative_from
from schoenbat.report.tables import plain_table

# A bias whose limit is above this is not known at all.
UNTOLD = 0.5
# Of a head, where the bound's first informative D is told.
HEAD_DIMS = (16, 32, 64, 128)


def theorem_tables(rows: Sequence[Row]) -> Iterator[Table | str]:
    """The tables of all checks, in the order of the paper's theorems, with sentences after some."""
    biases = [row for row in rows if isinstance(row, BiasRow)]
    tails = [row for row in rows if isinstance(row, TailRow)]
    kernels = [row for row in rows if isinstance(row, KernelRow)]
    yield _bias_table(biases)
    yield from _bias_lines(biases)
    for inputs in dict.fromkeys(row.inputs for row in tails):
        yield _tail_table([row for row in tails if row.inputs == inputs])
    yield _informative_table(sorted({row.epsilon for row in tails}))
    yield _kernel_table(kernels)
    yield from _kernel_lines(kernels)
    yield _formula_table([row for row in rows if isinstance(row, FormulaRow)])
    yield _restoring_table([row for row in rows if isinstance(row, RestoringRow)])


def _bias_table(rows: Sequence[BiasRow]) -> Table:
    maps, head_dim = rows[0].maps, rows[0].head_dim
    table = plain_table(f"bias over {maps:,} maps, d = {head_dim}, exp, scale 1/√d", "map", "D")
    table.caption = (
        "numerator, denominator: share of themselves; ratio, rmfa: share of attention minus averaging,\n"
        "+ too sharp, − too flat. < : cannot be told from none, and two standard errors below that; ?: not\n"
        "even that. floored: rows where rmfa is not the ratio"
    )
    for heading in (*QUANTITIES, "floored"):
        table.add_column(heading, justify="right")
    cells: dict[tuple[str, int], list[BiasRow]] = {}
    for row in rows:
        cells.setdefault((row.construction, row.num_features), []).append(row)
    for (construction, count), measured in cells.items():
        floored = f"{measured[0].floored:.0%}"
        table.add_row(construction, str(count), *map(_bias, measured), floored)
    return table


def _bias(row: BiasRow) -> str:
    if not row.significant:
        # Of a ratio with denominators near zero no number of maps tells the mean.
        return "?" if row.limit > UNTOLD else f"< {row.limit:.1g}"
    sign = "" if row.quantity not in ("ratio", "rmfa") else "+" if row.along > 0 else "−"
    return f"{sign}{row.bias:.2g} ± {row.standard_error:.1g}"


def _bias_lines(rows: Sequence[BiasRow]) -> Iterator[str]:
    for construction in dict.fromkeys(row.construction for row in rows):
        for quantity, called in (("ratio", "the ratio"), ("rmfa", "rmfa")):
            found = decay(rows, construction, quantity)
            if found is not None:
                where = f"from D = {found.first} to D = {found.last}"
                yield f"{construction}: the bias of {called} falls like D^{found.power:.2f} {where}"


def _tail_table(rows: Sequence[TailRow]) -> Table:
    first = rows[0]
    epsilons = list(dict.fromkeys(row.epsilon for row in rows))
    table = plain_table(
        f"P(|error| > ε), {first.inputs}: {first.kernel}, d = {first.head_dim}, S = 1, "
        f"{first.maps:,} maps: measured (bound)",
        "D",
    )
    table.caption = "– : the bound is 1 or more and says nothing. !: more often than the bound allows"
    for epsilon in epsilons:
        table.add_column(f"ε = {epsilon:g}", justify="right")
    cells = {(row.num_features, row.epsilon): _tail(row) for row in rows}
    for count in dict.fromkeys(row.num_features for row in rows):
        table.add_row(f"{count:,}", *(cells[count, epsilon] for epsilon in epsilons))
    table.add_section()
    averaging = {row.epsilon: f"{row.averaging:.2g}" for row in rows}
    table.add_row("plain averaging", *(averaging[epsilon] for epsilon in epsilons))
    return table


def _tail(row: TailRow) -> str:
    if row.bound >= 1:
        return f"{row.entry:.2g} (–)"
    return f"{'!' if row.entry > row.bound else ''}{row.entry:.2g} ({row.bound:.1g})"


def _informative_table(epsilons: Sequence[float]) -> Table:
    table = plain_table("the number of features D from which on the bound is below 1, S = 1", "d")
    for epsilon in epsilons:
        table.add_column(f"ε = {epsilon:g}", justify="right")
    for head_dim in HEAD_DIMS:
        table.add_row(str(head_dim), *(f"{informative_from(epsilon, head_dim):,}" for epsilon in epsilons))
    return table


def _kernel_table(rows: Sequence[KernelRow]) -> Table:
    from_exp = [row for row in rows if row.kernel == "exp"]
    table = plain_table(
        f"exact attention, distance to that with exp, share of exp minus averaging, d = {rows[0].head_dim}",
        "scale",
    )
    equal = dict.fromkeys(f"{row.other} = {row.kernel}" for row in rows if row.equal)
    table.caption = f"equal to the last bit, coefficients and RMFA too: {', '.join(equal) or 'none'}"
    others = list(dict.fromkeys(row.other for row in from_exp))
    for other in (*others, f"{others[-1]},\nof the output"):
        table.add_column(other, justify="right")
    for scale in dict.fromkeys(row.scale for row in from_exp):
        line = [row for row in from_exp if row.scale == scale]
        shares = (f"{row.of_signal:.2g}" for row in line)
        table.add_row(f"{scale:.3g}", *shares, f"{line[-1].of_output:.2g}")
    return table


def _kernel_lines(rows: Sequence[KernelRow]) -> Iterator[str]:
    for row in rows:
        if (row.kernel, row.other) == ("sqrt", HALF_SCALE.name):
            yield f"scale {row.scale:.3g}: sqrt is {row.other} but for {row.of_signal:.1g} of that share"


def _formula_table(rows: Sequence[FormulaRow]) -> Table:
    table = plain_table("ppSBN's theorem where V = 1 and its left side is 1", "tokens", "right side")
    for row in rows:
        table.add_row(str(row.num_tokens), f"{row.right_side:.3g}")
    return table


def _restoring_table(rows: Sequence[RestoringRow]) -> Table:
    table = plain_table(
        "attention after pre-SBN, distance to that of the rows as they were; 1 is plain averaging", "after it"
    )
    values = list(dict.fromkeys(row.values for row in rows))
    for kind in values:
        table.add_column(f"{kind} values", justify="right")
    residuals = {(row.method, row.values): f"{row.residual:.2g}" for row in rows}
    for method in dict.fromkeys(row.method for row in rows):
        table.add_row(method, *(residuals[method, kind] for kind in values))
    return table
