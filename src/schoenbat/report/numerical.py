"""The paper's two numerical experiments, error and speed-up: tables, and what holds of its sentences."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from statistics import mean
from typing import Any

from schoenbat.experiments.error import ErrorRow
from schoenbat.experiments.measurement import PASSES
from schoenbat.experiments.speed import SpeedRow, speedup
from schoenbat.report.markdown import NOT_MEASURED, table

PAPERS_MAP = "paper"

Claim = tuple[str, str]
"""What the paper says, and what is so here."""


def error_table(rows: Sequence[ErrorRow]) -> str:
    """Mean absolute error, and in brackets relative to plain averaging, at corners of the paper's grid."""
    corners = list(product(_three(row.head_dim for row in rows), _ends(row.num_features for row in rows)))
    cells = {(row.construction, row.kernel, row.head_dim, row.num_features): row for row in rows}
    lines = []
    constructions = dict.fromkeys(row.construction for row in rows)
    for construction, kernel in product(constructions, dict.fromkeys(row.kernel for row in rows)):
        found = (cells.get((construction, kernel, *corner)) for corner in corners)
        shown = (NOT_MEASURED if row is None else f"{row.error:.2g} ({row.relative:.2g})" for row in found)
        lines.append([construction, kernel, *shown])
    return table(["map", "kernel", *(f"d = {d}, D = {count}" for d, count in corners)], lines)


def error_claims(rows: Sequence[ErrorRow]) -> list[Claim]:
    """The sentences of the paper on its figure, each counted with the paper's own map."""
    ours = [row for row in rows if row.construction == PAPERS_MAP]
    if not ours:
        return []
    error = {(row.kernel, row.head_dim, row.num_features): row.error for row in ours}
    kernels, dims, counts = (list(dict.fromkeys(names)) for names in zip(*error, strict=True))
    falls = [error[k, d, a] > error[k, d, b] for k in kernels for d in dims for a, b in pairwise(counts)]
    rises = [error[k, a, c] < error[k, b, c] for k in kernels for c in counts for a, b in pairwise(dims)]
    averages = {kernel: mean(row.error for row in ours if row.kernel == kernel) for kernel in kernels}
    ranking = ", ".join(f"{name} {averages[name]:.2g}" for name in sorted(averages, key=averages.__getitem__))
    below = [row for row in ours if row.num_features < row.head_dim]
    claims = [
        ("the error falls as D rises", f"in {sum(falls)} of {len(falls)} steps of D"),
        ("the error rises with d", f"in {sum(rises)} of {len(rises)} steps of d"),
        ("it is smallest for exp, larger for logi and trigh", f"averages over the grid: {ranking}"),
        (
            "the approximation is good where D is below d",
            f"better than plain averaging in {sum(row.relative < 1 for row in below)} of {len(below)} cells",
        ),
    ]
    if {"exp", "trigh"} <= set(kernels):
        apart = max(abs(error["exp", d, c] - error["trigh", d, c]) for d in dims for c in counts)
        how = f"differ by at most {apart:.1g}" if apart else "are equal in every cell"
        claims.append(("trigh falls the slowest", f"it is exp by identity; the two {how}"))
    return claims


def speed_table(rows: Sequence[SpeedRow]) -> str:
    """How many times faster RMFA is than each rival, forward / forward and backward."""
    rivals = [name for name in ("exact", "sdpa") if any(row.method == name for row in rows)]
    ours = [row for row in rows if row.method == "rmfa"]
    counts = _three(row.num_features for row in ours if row.num_features)
    lines = []
    for kernel, length in product(dict.fromkeys(row.kernel for row in ours), _ends(r.length for r in ours)):
        ratios = []
        for rival, count in product(rivals, counts):
            place = kernel, length, count
            found = {r.direction: r for r in ours if (r.kernel, r.length, r.num_features) == place}
            both = (speedup(rows, found[name], rival) if name in found else None for name in PASSES)
            ratios.append(" / ".join(NOT_MEASURED if ratio is None else f"{ratio:.1f}" for ratio in both))
        lines.append([str(kernel), f"{length:,}", *ratios])
    names = {"exact": "exact", "sdpa": "SDPA"}
    heading = [f"over {names[rival]}, D = {count}" for rival, count in product(rivals, counts)]
    return table(["kernel", "n", *heading], lines)


def speed_claims(rows: Sequence[SpeedRow]) -> list[Claim]:
    """The sentences of the paper on its figure: speed-ups over exact attention, forward and with backward."""
    sentences = "the speed-up rises with n", "it falls as D rises", "it is largest for logi, least for exp"
    found = [facts for name in PASSES if (facts := _speed_facts(rows, name))]
    return list(zip(sentences, map("; ".join, zip(*found, strict=True)), strict=True)) if found else []


def _speed_facts(rows: Sequence[SpeedRow], direction: str) -> list[str]:
    """What one direction says to each of the sentences; nothing where there is no rival."""
    ratios = {
        (row.kernel, row.length, row.num_features): ratio
        for row in rows
        if row.method == "rmfa" and row.direction == direction
        for ratio in [speedup(rows, row, "exact")]
        if ratio is not None
    }
    if not ratios:
        return []
    kernels, lengths, counts = (list(dict.fromkeys(names)) for names in zip(*ratios, strict=True))
    known = ratios.get
    rises = _compare(
        ((known((k, a, c)), known((k, b, c))) for k in kernels for c in counts for a, b in pairwise(lengths)),
        lambda a, b: a < b,
    )
    falls = _compare(
        ((known((k, n, a)), known((k, n, b))) for k in kernels for n in lengths for a, b in pairwise(counts)),
        lambda a, b: a > b,
    )
    averages = {k: mean(ratio for (name, *_), ratio in ratios.items() if name == k) for k in kernels}
    ranking = ", ".join(f"{k} {averages[k]:.1f} ×" for k in sorted(averages, key=lambda k: -averages[k]))
    facts = f"in {rises} steps of n", f"in {falls} steps of D", f"{ranking} on average"
    return [f"{direction}: {fact}" for fact in facts]


def length_table(rows: Sequence[SpeedRow], options: Mapping[str, Any]) -> str:
    """RMFA with one number of features beside SDPA over the length; memory in units of q, k, v and output."""
    found = {(row.method, row.length, row.direction): row for row in rows}
    lines = []
    for (method, length, direction), row in found.items():
        if method != "rmfa" or row.median is None:
            continue
        softmax = found["sdpa", length, direction]
        sdpa, tensors = softmax.median, 4 * options["num_heads"] * length * options["head_dim"] * 4
        lines.append(
            [
                f"{length:,}",
                direction,
                "" if sdpa is None else f"{1e3 * sdpa:,.1f}",
                f"{1e3 * row.median:,.1f}",
                "" if sdpa is None else f"{sdpa / row.median:.1f} ×",
                *("" if r.memory is None else f"{r.memory / tensors:.2f}" for r in (softmax, row)),
            ]
        )
    heading = ["n", "pass", "SDPA, ms", "RMFA, ms", "faster by", "SDPA, memory", "RMFA, memory"]
    return table(heading, lines)


def claims_table(claims: Sequence[Claim], here: str = "here") -> str:
    return table(["the paper says", here], claims)


def _compare(
    pairs: Iterable[tuple[float | None, float | None]], holds: Callable[[float, float], bool]
) -> str:
    found = [holds(a, b) for a, b in pairs if a is not None and b is not None]
    return f"{sum(found)} of {len(found)}"


def _ends(values: Iterable[int]) -> list[int]:
    """
    >>> _ends([10, 20, 30]), _ends([7])
    ([10, 30], [7])
    """
    ordered = sorted(set(values))
    return sorted({ordered[0], ordered[-1]})


def _three(values: Iterable[int]) -> list[int]:
    """
    >>> _three([10, 50, 100, 150, 200])
    [10, 100, 200]
    """
    ordered = sorted(set(values))
    return sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]})
