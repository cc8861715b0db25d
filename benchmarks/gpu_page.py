"""The README's figures of a GPU, from what `gpu.py` measured: ``python benchmarks/gpu_page.py``.

Reads nvidia-h200.json in benchmarks/results and lra.json in results; writes speeds and accuracies between
their markers in README.md, and docs/time-against-length.svg where ever longer sequences were measured.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from schoenbat.experiments.groups import find_group
from schoenbat.files import write_atomically
from schoenbat.report.arena import own_accuracy_table, sdpa_table
from schoenbat.report.lra import NAIVE, LraTable, collect
from schoenbat.report.markdown import table
from schoenbat.report.pages import fill
from schoenbat.report.plots import scaling_plot

HERE = Path(__file__).parent
PAGE = HERE.parent / "README.md"
PLOT = HERE.parent / "docs" / "time-against-length.svg"
GPU = HERE / "results" / "nvidia-h200.json"
RUNS = HERE.parent / "results" / "lra.json"
LENGTHS = "16 × "  # the sequences of the plot
DECODE = "decode"
# What a reader of the README looks for first: d = 64 and D = 128 with backward, and as far as softmax goes.
TRAINING = ("forward+backward", "causal forward+backward")
SHOWN = {
    ("128 × 1,024", "exact-low"): TRAINING,
    ("128 × 4,096", "exact-low"): TRAINING,
    ("32 × 16,384", "exact-low"): TRAINING,
    ("32 × 16,384", "unbiased"): TRAINING,
    ("16 × 4,096", "exact-low"): TRAINING[:1],
    ("16 × 65,536", "exact-low"): TRAINING[:1],
    ("8 × 262,144", "exact-low"): ("forward",),
}
CLOSEST = "performer"
RIVALS = {
    "SDPA (flash)": "flash",
    "fla, features ready-made": "fla",
    "exact kernel by FlexAttention": "exact inv by FlexAttention",
    "exact for the 64 nearest": "triton, ±64 exact",
    "`SchoenbAt`, with ppSBN": "module",
}
METHODS = {"triton": "RMFA", "cudnn": "SDPA (cuDNN)"}
STEPS = {"forward+backward": "bidirectional", "causal forward+backward": "causal"}

Rows = list[dict[str, Any]]


def main() -> None:
    measured = json.loads(GPU.read_text(encoding="utf-8"))["rows"]
    if curves := lengths(measured):
        write_atomically(PLOT, scaling_plot(curves))
    write_atomically(PAGE, fill(PAGE.read_text(encoding="utf-8"), tables(measured)))


def tables(measured: Rows) -> dict[str, str]:
    return {"gpu": headline_table(measured), "accuracy": accuracy_table()}


def headline_table(rows: Rows) -> str:
    """Replayed by a CUDA graph and called from Python, which then takes longer than the kernels."""
    found = {(row["shape"], row["method"], row["direction"]): row for row in rows}
    lines = []
    for (size, construction), directions in SHOWN.items():
        for direction in directions:
            shape = f"{size}, 64, 128, {construction}"
            own, softmax = (found[shape, method, direction] for method in METHODS)
            cells = []
            for how in ("median", "call"):
                cells += [f"{1e3 * row[how]:,.2f}" for row in (own, softmax)]
                cells.append(f"{softmax[how] / own[how]:,.1f} ×")
            lines.append([size, construction, direction, *cells])
    names = "RMFA", "SDPA", "faster by"
    heading = ["heads × n", "map", "pass", *names, *(f"{name}, called" for name in names)]
    return table(heading, lines, [column > 2 for column in range(len(heading))])


def speed_table(rows: Rows) -> str:
    found = {(row["shape"], row["method"], row["direction"]): row for row in rows}
    lines = []
    for (shape, method, direction), row in found.items():
        if method != "triton" or shape.startswith(LENGTHS):
            continue
        softmax, eager = (found.get((shape, other, direction)) for other in ("cudnn", "eager"))
        cells = [
            f"{1e3 * row['median']:.3f}",
            f"{row['median'] / row['floor']:.1f}" if direction in ("forward", DECODE) else "",
            "" if softmax is None else f"{1e3 * softmax['median']:.3f}",
            "" if softmax is None else f"{softmax['median'] / row['median']:.1f} ×",
            "" if softmax is None else f"{softmax['call'] / row['call']:.1f} ×",
            "" if eager is None else f"{eager['median'] / row['median']:.1f}",
            str(row["revision"])[:7],
        ]
        lines.append([shape, direction, *cells])
    figures = ["RMFA, ms", "floors", "SDPA (cuDNN), ms", "faster by", "called", "eager / fused", "revision"]
    return _table(["pass", *figures], lines, words=2)


def rivals_table(rows: Rows) -> str:
    """What else was measured on the same tensors, divided by the time of RMFA."""
    found = {(row["shape"], row["method"], row["direction"]): row["median"] for row in rows}
    measured = {method for _, method, _ in found}
    rivals = {title: method for title, method in RIVALS.items() if method in measured}
    lines = []
    for (shape, method, direction), own in found.items():
        if method != "triton" or shape.startswith(LENGTHS):
            continue
        others = [found.get((shape, rival, direction)) for rival in rivals.values()]
        if any(others[1:]):  # SDPA alone is in the table above
            ratios = ["" if other is None else f"{other / own:.1f} ×" for other in others]
            lines.append([shape, direction, f"{1e3 * own:.3f}", *ratios])
    return _table(["pass", "RMFA, ms", *rivals], lines, words=2)


def memory_table(rows: Rows) -> str:
    """Peak memory of a training step divided by what q, k, v, the output and their gradients take.

    The file counts what a step takes beyond q, k and v. The output's gradient is a tensor more, for which the
    benchmark takes v.
    """
    found: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        if row["direction"] in STEPS and row["method"] in METHODS and not row["shape"].startswith(LENGTHS):
            tensor = _bytes_of_a_tensor(row["shape"])
            shape = found.setdefault(row["shape"], {})
            shape[row["method"], row["direction"]] = (row["memory"] + 4 * tensor) / (8 * tensor)
    columns = [(method, direction) for direction in STEPS for method in METHODS]
    titles = [f"{METHODS[method]}, {STEPS[direction]}" for method, direction in columns]
    lines = [
        [name, *(f"{cells[column]:.2f}" if column in cells else "" for column in columns)]
        for name, cells in found.items()
    ]
    return _table(titles, lines, words=1)


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """A line for each shape, whose figures come after so many columns of words."""
    heading = ["B·H × n, d, D, map", *titles]
    return table(heading, lines, [column >= words for column in range(len(heading))])


def _bytes_of_a_tensor(shape: str) -> int:
    """Of ``"32 × 16,384, 64, 128, exact-low"`` 32 · 16,384 · 64 numbers of two bytes."""
    sequences, rest = shape.split(" × ")
    length, head_dim, *_ = rest.split(", ")
    return 2 * int(sequences) * int(length.replace(",", "")) * int(head_dim)


def training_table() -> str:
    """A training step of the Long Range Arena with softmax and with SchoenbAt, each as tuned."""
    return sdpa_table(_runs_of({*find_group("main").attentions.values(), NAIVE}))


def accuracy_table() -> str:
    """Accuracy on the Long Range Arena of the same, and of the closest rival."""
    return own_accuracy_table(_runs_of({*find_group("main").attentions.values(), CLOSEST}))


def _runs_of(attentions: set[str]) -> LraTable:
    results = collect(RUNS)
    rows, averages = (
        tuple(row for row in found if row.attention in attentions)
        for found in (results.rows, results.averages)
    )
    return replace(results, rows=rows, averages=averages)


def lengths(rows: Rows) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Seconds against the length, by pass and method."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        if not row["shape"].startswith(LENGTHS):
            continue
        length = int(row["shape"].removeprefix(LENGTHS).split(", ")[0].replace(",", ""))
        panel = curves.setdefault(row["direction"], {})
        panel.setdefault(METHODS[row["method"]], []).append((length, row["median"]))
        if row["method"] == "triton" and row["direction"] == "forward":
            panel.setdefault("q, k, v read and output written once", []).append((length, row["floor"]))
    return curves


if __name__ == "__main__":
    main()
