"""Results as tables for a terminal of 100 columns; in 80 they are narrower, and nothing is cut."""

from collections.abc import Iterator, Sequence
from statistics import median

from rich import box
from rich.table import Table

from schoenbat.experiments.comparison import AttentionError, AttentionSpeed, growth
from schoenbat.experiments.demo import DemoRow
from schoenbat.experiments.error import ErrorRow
from schoenbat.experiments.measurement import BACKWARD, FORWARD, PASSES
from schoenbat.experiments.speed import CONSTRUCTION, SpeedRow, crossover, find_rival, over_sdpa, speedup
from schoenbat.report.markdown import NOT_MEASURED
from schoenbat.translation.record import EpochRow


def error_tables(rows: Sequence[ErrorRow]) -> Iterator[Table]:
    """One table for each construction: mean absolute error, and in brackets the relative error."""
    counts = sorted({row.num_features for row in rows})
    for construction in dict.fromkeys(row.construction for row in rows):
        table = plain_table(
            f"{construction}: mean absolute error (relative to plain averaging)", "kernel", "d"
        )
        for count in counts:
            table.add_column(f"D = {count}", justify="right")
        chosen = [row for row in rows if row.construction == construction]
        for kernel, head_dim in dict.fromkeys((row.kernel, row.head_dim) for row in chosen):
            cells = {
                row.num_features: f"{row.error:.2g} ({row.relative:.2g})"
                for row in chosen
                if (row.kernel, row.head_dim) == (kernel, head_dim)
            }
            table.add_row(kernel, str(head_dim), *(cells.get(count, NOT_MEASURED) for count in counts))
        yield table


def speed_tables(rows: Sequence[SpeedRow]) -> Iterator[Table]:
    """One table for each kernel: RMFA's time, how many times faster than its rivals, and peak memory."""
    rivals = [name for name in ("sdpa", "exact") if any(row.method == name for row in rows)]
    ours = [row for row in rows if row.method == "rmfa"]
    for kernel in dict.fromkeys(row.kernel for row in ours):
        table = plain_table(f"RMFA with {kernel}: time, speed-up, peak memory of fwd+bwd", "n", "D")
        # Headings are no wider than the figures below them: in 80 columns nothing is cut.
        for heading in ("\nfwd ms", "fwd+\nbwd ms"):
            table.add_column(heading, justify="right")
            for rival in rivals:
                table.add_column(f"vs\n{rival}", justify="right")
        for heading in ("MiB\nRMFA", *(f"\n{rival}" for rival in rivals)):
            table.add_column(heading, justify="right")
        for forward in ours:
            if forward.kernel == kernel and forward.direction == FORWARD:
                table.add_row(*_speed_cells(rows, forward, rivals))
        yield table


def crossover_lines(rows: Sequence[SpeedRow]) -> Iterator[str]:
    """From which length on RMFA is faster than SDPA, in words."""
    for kernel in dict.fromkeys(row.kernel for row in rows if row.method == "rmfa"):
        for direction in PASSES:
            measured, length = over_sdpa(rows, kernel, direction), crossover(rows, kernel, direction)
            where = f"not faster than SDPA up to n = {max(measured, default=0):,}"
            if not measured:
                where = "not measured beside SDPA"
            elif length:
                where = f"faster than SDPA from n = {length:,} on"
            yield f"{direction}: RMFA with {kernel} and the map {CONSTRUCTION} is {where}"


def attention_speed_table(rows: Sequence[AttentionSpeed]) -> Table:
    """One row for each attention: milliseconds at every length, peak memory at the longest, and growth."""
    both = [row for row in rows if row.direction == BACKWARD]
    lengths = sorted({row.length for row in both})
    table = plain_table("forward+backward: milliseconds and peak memory over the length n")
    table.caption = "growth: the power of n from the first to the last length; 1 is linear, 2 quadratic"
    table.add_column("attention", overflow="fold")
    headings = [f"n = {length:,}\nms" for length in lengths]
    for heading in (*headings, "time\ngrowth", f"n = {lengths[-1]:,}\nMiB", "memory\ngrowth"):
        table.add_column(heading, justify="right")
    for attention in dict.fromkeys(row.attention for row in both):
        cells = {row.length: row for row in both if row.attention == attention}
        table.add_row(
            attention,
            *(_number(cells[length].median, 1e3) for length in lengths),
            _exponent(growth(both, attention, "median", BACKWARD)),
            _number(cells[lengths[-1]].memory, 2**-20),
            _exponent(growth(both, attention, "memory", BACKWARD)),
        )
    return table


def attention_error_table(rows: Sequence[AttentionError]) -> Table:
    """One row for each attention: error at every length, those apart that approximate something else."""
    lengths = sorted({row.length for row in rows})
    table = plain_table(
        "error against softmax(QKᵀ/√d)V, ± its standard error; 0 is softmax, 1 plain averaging"
    )
    table.caption = (
        "* approximates something else than softmax(QKᵀ/√d), or nothing: a distance, no approximation error"
    )
    table.add_column("attention", overflow="fold")
    for length in lengths:
        table.add_column(f"n = {length:,}", justify="right")
    for approximating in (True, False):
        chosen = [row for row in rows if row.approximates_softmax == approximating]
        for attention in dict.fromkeys(row.attention for row in chosen):
            cells = {row.length: row for row in chosen if row.attention == attention}
            errors = (f"{cells[n].error:.2g} ± {cells[n].standard_error:.1g}" for n in lengths)
            table.add_row(attention if approximating else f"{attention} *", *errors)
        table.add_section()
    return table


def demo_table(rows: Sequence[DemoRow]) -> Table:
    """The attentions side by side, with the accuracy of always answering the most frequent label."""
    table = plain_table("ListOps, short expressions: validation accuracy", "attention")
    for column in ("parameters", "seconds", "accuracy"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.attention, f"{row.parameters:,}", f"{row.seconds:.0f}", f"{row.accuracy:.1%}")
    table.add_section()
    table.add_row("most frequent label", "", "", f"{rows[0].majority:.1%}")
    return table


def translation_table(rows: Sequence[EpochRow]) -> Table:
    """One row for each attention: the epoch that was tested, and how well it translates."""
    table = plain_table("Multi30k, German to English: the epoch of the lowest validation loss")
    table.caption = "perplexity of a subword; BLEU by sacreBLEU, in validation by greedy search"
    table.add_column("attention", overflow="fold")
    # As in `speed_tables`.
    headings = ("para-\nmeters", "seconds\nan epoch", "\nepoch", "\nloss", "perplex-\nity", "\nBLEU")
    for heading in (*headings, "test BLEU\ngreedy", "\nbeam"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.test_bleu_greedy is None or row.test_bleu_beam is None:
            continue
        seconds = [each.seconds for each in rows if each.attention == row.attention]
        table.add_row(
            row.attention,
            f"{row.parameters:,}",
            _number(median(seconds)),
            f"{row.epoch}",
            f"{row.validation_loss:.3f}",
            _number(row.perplexity),
            f"{row.validation_bleu:.1f}",
            f"{row.test_bleu_greedy:.1f}",
            f"{row.test_bleu_beam:.1f}",
        )
    return table


def demo_summary(
    errors: Sequence[ErrorRow], speeds: Sequence[SpeedRow], trained: Sequence[DemoRow]
) -> Iterator[str]:
    """What the demo has shown, in a few sentences."""
    size = errors[-1].kernel, errors[-1].head_dim, errors[-1].num_features
    for point in errors:
        if (point.kernel, point.head_dim, point.num_features) == size:
            yield (
                f"error of the {point.construction!r} map for {point.kernel} at d = {point.head_dim}, "
                f"D = {point.num_features}: {point.relative:.2g} of what plain averaging has"
            )
    measured = [row for row in speeds if row.method == "rmfa" and speedup(speeds, row, "sdpa")]
    for row in measured[-2:]:
        ratio = _number(speedup(speeds, row, "sdpa"))
        yield f"{row.direction} at n = {row.length:,}: RMFA is {ratio} times as fast as SDPA"
    yield from crossover_lines(speeds)
    times = ", ".join(f"{row.attention} {row.seconds:.0f} s" for row in trained)
    yield f"training time: {times} (sequences this short are where softmax is the faster one)"
    accuracies = ", ".join(f"{row.attention} {row.accuracy:.1%}" for row in trained)
    yield f"ListOps accuracy: {accuracies}, most frequent label {trained[0].majority:.1%}"


def _speed_cells(rows: Sequence[SpeedRow], forward: SpeedRow, rivals: Sequence[str]) -> Iterator[str]:
    both = next(
        row
        for row in rows
        if row.direction == BACKWARD
        and (row.method, row.kernel, row.length, row.num_features)
        == ("rmfa", forward.kernel, forward.length, forward.num_features)
    )
    yield f"{forward.length:,}"
    yield str(forward.num_features)
    for row in (forward, both):
        yield _number(row.median, 1e3)
        for rival in rivals:
            yield _number(speedup(rows, row, rival), unit="×")
    for measured in (both, *(find_rival(rows, both, name) for name in rivals)):
        yield _number(measured.memory if measured else None, 2**-20)


def _number(value: float | None, factor: float = 1.0, unit: str = "") -> str:
    """Three digits, or all before the point."""
    if value is None:
        return NOT_MEASURED
    scaled = value * factor
    return (f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}") + unit


def _exponent(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}"


def plain_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption_justify = "left"
    for column in columns:
        table.add_column(column)
    return table
