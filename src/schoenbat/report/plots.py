"""Results as figures, drawn to SVG text without a display."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from schoenbat.experiments.demo import DemoRow
from schoenbat.experiments.error import ErrorRow
from schoenbat.experiments.speed import PASSES, SpeedRow, speedup

LABELS = {"rmfa": "RMFA", "sdpa": "SDPA", "exact": "exact kernelized attention"}


def error_plot(rows: Sequence[ErrorRow]) -> str:
    """Error against the number of features: kernels from left to right, constructions from top to bottom."""
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    constructions = list(dict.fromkeys(row.construction for row in rows))
    figure, panels = _panels(len(constructions), len(kernels), sharey="all")
    for line, construction in zip(panels, constructions, strict=True):
        for axes, kernel in zip(line, kernels, strict=True):
            chosen = [row for row in rows if (row.kernel, row.construction) == (kernel, construction)]
            for head_dim in dict.fromkeys(row.head_dim for row in chosen):
                curve = [row for row in chosen if row.head_dim == head_dim]
                axes.errorbar(
                    [row.num_features for row in curve],
                    [row.error for row in curve],
                    yerr=[row.standard_error for row in curve],
                    marker=".",
                    label=f"d = {head_dim}",
                )
            axes.set(title=f"{kernel}, {construction}", yscale="log")
    _name_axes(panels, "features D", "mean absolute error")
    return _finish(figure, panels)


def speedup_plot(rows: Sequence[SpeedRow]) -> str:
    """Speed-up against the number of features, a curve for each length: kernels from left to right."""
    ours = [row for row in rows if row.method == "rmfa"]
    kernels = list(dict.fromkeys(row.kernel for row in ours))
    rivals = [name for name in ("exact", "sdpa") if any(row.method == name for row in rows)]
    kinds = [(rival, direction) for rival in rivals for direction in PASSES]
    figure, panels = _panels(len(kinds), len(kernels), sharey="row")
    for line, (rival, direction) in zip(panels, kinds, strict=True):
        for axes, kernel in zip(line, kernels, strict=True):
            for length in dict.fromkeys(row.length for row in ours):
                points = [
                    (row.num_features, speedup(rows, row, rival))
                    for row in ours
                    if (row.kernel, row.length, row.direction) == (kernel, length, direction)
                ]
                _curve(axes, points, f"n = {length:,}")
            axes.axhline(1.0, color="grey", linewidth=0.8)
            axes.set(title=f"{kernel}, {direction}", yscale="log")
        line[0].set_ylabel(f"times faster than\n{LABELS[rival]}")
    _name_axes(panels, "features D")
    return _finish(figure, panels)


def length_plot(rows: Sequence[SpeedRow]) -> str:
    """Time and memory of every method against the length of the sequence."""
    quantities = {"median": "seconds", "memory": "peak memory, MiB"}
    figure, panels = _panels(len(quantities), len(PASSES), sharey="row")
    for line, (quantity, name) in zip(panels, quantities.items(), strict=True):
        for axes, direction in zip(line, PASSES, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for method, kernel in dict.fromkeys((row.method, row.kernel) for row in rows):
                points = [
                    (row.length, getattr(row, quantity))
                    for row in rows
                    if (row.method, row.kernel, row.direction) == (method, kernel, direction)
                ]
                factor = 2**-20 if quantity == "memory" else 1.0
                label = f"{LABELS[method]}, {kernel}" if kernel else LABELS[method]
                _curve(axes, [(x, y and y * factor) for x, y in points], label)
            axes.set(title=direction)
        line[0].set_ylabel(name)
    _name_axes(panels, "tokens n")
    return _finish(figure, panels)


def training_plot(rows: Sequence[DemoRow]) -> str:
    """Loss and validation accuracy of every attention during training."""
    figure, panels = _panels(1, 2)
    loss_axes, accuracy_axes = panels[0]
    for row in rows:
        steps = [progress.step for progress in row.result.history]
        loss_axes.plot(steps, [progress.loss for progress in row.result.history], label=row.attention)
        accuracy_axes.plot(
            steps, [100 * progress.accuracy for progress in row.result.history], label=row.attention
        )
    accuracy_axes.axhline(100 * rows[0].majority, color="grey", linestyle=":", label="most frequent label")
    loss_axes.set(ylabel="training loss")
    accuracy_axes.set(ylabel="validation accuracy, %", ylim=(0, None))
    _name_axes(panels, "steps")
    return _finish(figure, panels)


def _panels(num_rows: int, num_columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure with a grid of axes, always two-dimensional."""
    figure = Figure(figsize=(1 + 2.8 * num_columns, 1 + 2.4 * num_rows), layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, **options)


def _curve(axes: Any, points: Iterable[tuple[Any, Any]], label: str) -> None:
    known = [(x, y) for x, y in points if y]
    axes.plot([x for x, _ in known], [y for _, y in known], marker=".", label=label)


def _name_axes(panels: Any, x: str, y: str | None = None) -> None:
    for axes in panels[-1]:
        axes.set_xlabel(x)
    for axes in panels[:, 0] if y else []:
        axes.set_ylabel(y)


def _finish(figure: Figure, panels: Any) -> str:
    """The SVG text, the same for the same results whenever it is drawn."""
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    handles, labels = panels.flat[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "schoenbat"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
