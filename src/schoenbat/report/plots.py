"""Results as figures, drawn to SVG text without a display."""

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from schoenbat.experiments.comparison import AttentionError, AttentionSpeed, approximates_softmax
from schoenbat.experiments.demo import DemoRow
from schoenbat.experiments.error import ErrorRow
from schoenbat.experiments.measurement import PASSES
from schoenbat.experiments.speed import SpeedRow, speedup
from schoenbat.experiments.theorems import BiasRow, KernelRow, Row, TailRow
from schoenbat.translation.record import EpochRow

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
    curves: dict[str, list[SpeedRow]] = {}
    for row in rows:
        label = f"{LABELS[row.method]}, {row.kernel}" if row.kernel else LABELS[row.method]
        curves.setdefault(label, []).append(row)
    figure, panels = _cost_panels(curves)
    return _finish(figure, panels)


def scaling_plot(curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> str:
    """Seconds against the length: a panel for each pass, in it a curve for each method."""
    figure, panels = _panels(1, len(curves), sharey=True)
    for axes, (title, lines) in zip(panels.flat, curves.items(), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=title)
        for label, points in lines.items():
            _curve(axes, points, label)
    _name_axes(panels, "tokens n", "seconds")
    return _finish(figure, panels)


def attention_speed_plot(rows: Sequence[AttentionSpeed]) -> str:
    """Time and memory of every attention against the length of the sequence."""
    curves: dict[str, list[AttentionSpeed]] = {}
    for row in rows:
        curves.setdefault(row.attention, []).append(row)
    figure, panels = _cost_panels(curves, _styles(curves))
    return _finish(figure, panels, num_columns=4)


def attention_error_plot(rows: Sequence[AttentionError]) -> str:
    """Error against the length: approximations of softmax, and beside them what has another aim."""
    titles = {True: "approximates softmax", False: "something else: a distance"}
    aims = [aim for aim in titles if any(row.approximates_softmax == aim for row in rows)]
    styles = _styles(row.attention for row in rows)
    figure, panels = _panels(1, len(aims), sharey="row")
    for axes, aim in zip(panels[0], aims, strict=True):
        axes.set_xscale("log", base=2)
        axes.set(title=titles[aim], yscale="log")
        chosen = [row for row in rows if row.approximates_softmax == aim]
        for attention in dict.fromkeys(row.attention for row in chosen):
            # A logarithmic axis has no place for softmax's own zero.
            curve = [row for row in chosen if row.attention == attention and row.error > 0]
            axes.errorbar(
                [row.length for row in curve],
                [row.error for row in curve],
                yerr=[row.standard_error for row in curve],
                label=attention,
                **styles[attention],
            )
        axes.axhline(1.0, color="grey", linewidth=0.8)
    _name_axes(panels, "tokens n", "error against softmax")
    return _finish(figure, panels, num_columns=2 * len(aims))


def training_plot(rows: Sequence[DemoRow]) -> str:
    """Loss and validation accuracy of every attention during training."""
    figure, panels = _panels(1, 2)
    loss_axes, accuracy_axes = panels[0]
    for row in rows:
        steps = [point.step for point in row.history]
        loss_axes.plot(steps, [point.loss for point in row.history], label=row.attention)
        accuracy_axes.plot(steps, [100 * point.accuracy for point in row.history], label=row.attention)
    accuracy_axes.axhline(100 * rows[0].majority, color="grey", linestyle=":", label="most frequent label")
    loss_axes.set(ylabel="training loss")
    accuracy_axes.set(ylabel="validation accuracy, %", ylim=(0, None))
    _name_axes(panels, "steps")
    return _finish(figure, panels)


def translation_plot(rows: Sequence[EpochRow]) -> str:
    """Loss, perplexity and BLEU of every attention after each epoch."""
    figure, panels = _panels(1, 3)
    quantities = {
        "validation_loss": "loss (dotted: training)",
        "perplexity": "validation perplexity",
        "validation_bleu": "validation BLEU",
    }
    for number, attention in enumerate(dict.fromkeys(row.attention for row in rows)):
        curve = [row for row in rows if row.attention == attention]
        epochs = [row.epoch for row in curve]
        for axes, quantity in zip(panels[0], quantities, strict=True):
            values = [getattr(row, quantity) for row in curve]
            axes.plot(epochs, values, marker=".", color=f"C{number}", label=attention)
        panels[0][0].plot(epochs, [row.train_loss for row in curve], color=f"C{number}", linestyle=":")
    for axes, title in zip(panels[0], quantities.values(), strict=True):
        axes.set(title=title)
        axes.xaxis.get_major_locator().set_params(integer=True)
    # Of the first epochs, whose perplexity is in the hundreds, a linear axis would show nothing else.
    panels[0][1].set_yscale("log")
    _name_axes(panels, "epoch")
    return _finish(figure, panels, num_columns=2)


def agreement_plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Agreement of converted models with their original against features, window and scale.

    Rows are those of examples/minilm_curves.py: a colour for each model, a kind of line for each corpus.
    """
    axis_names = {"features": "features D", "window": "window ±w", "scale": "factor on the logits"}
    quantities = {"cosine": "mean cosine", "spearman": "rank correlation"}
    figure, panels = _panels(len(quantities), len(axis_names), sharey="row")
    models = list(dict.fromkeys(map(_model_name, rows)))
    corpora = dict(zip(dict.fromkeys(row["corpus"] for row in rows), ("-", "--", ":", "-."), strict=False))
    for line, (quantity, quantity_name) in zip(panels, quantities.items(), strict=True):
        for axes, (against, name) in zip(line, axis_names.items(), strict=True):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel(name)
            # The legend keeps the last line of a name: the first corpus's, which is whole.
            for (number, model), corpus in itertools.product(enumerate(models), reversed(corpora)):
                chosen = [
                    row
                    for row in rows
                    if (row["against"], _model_name(row), row["corpus"]) == (against, model, corpus)
                ]
                style = {"color": f"C{number}", "linestyle": corpora[corpus]}
                _agreement_curve(axes, chosen, quantity, model, style)
        line[0].set_ylabel(quantity_name)
    for corpus, style in corpora.items():
        panels[0][0].plot([], [], color="grey", linestyle=style, label=corpus)
    return _finish(figure, panels, num_columns=4)


def _model_name(row: Mapping[str, Any]) -> str:
    return f"{row['attention']}, calibrated" if row["calibrated"] else row["attention"]


def _agreement_curve(
    axes: Any, rows: Sequence[Mapping[str, Any]], quantity: str, label: str, style: Mapping[str, Any]
) -> None:
    """A curve over the values; what has none, a model without a window, is a level across them."""
    known = sorted((row["value"], row[quantity]) for row in rows if row["value"] is not None)
    if known:
        _curve(axes, known, label, **style)
    for level in [row[quantity] for row in rows if row["value"] is None]:
        axes.axhline(level, linewidth=0.8, label=label, **style)


def theorem_plot(rows: Sequence[Row]) -> str:
    """Bias against D, the bound and what was measured against D, the kernels' distances against the scale."""
    tails = [row for row in rows if isinstance(row, TailRow)]
    kinds = list(dict.fromkeys(row.inputs for row in tails))
    figure, panels = _panels(1, 2 + len(kinds))
    for axes in panels[0][:-1]:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("features D")
    for axes in panels[0]:
        axes.set_yscale("log")
    _draw_bias(panels[0][0], [row for row in rows if isinstance(row, BiasRow)])
    for axes, inputs in zip(panels[0][1:], kinds, strict=False):
        _draw_tail(axes, [row for row in tails if row.inputs == inputs])
    _draw_kernels(panels[0][-1], [row for row in rows if isinstance(row, KernelRow)])
    return _finish(figure, panels, num_columns=5)


def _draw_bias(axes: Any, rows: Sequence[BiasRow]) -> None:
    """A curve for each map, ratio whole and rmfa dashed; what cannot be told from none is left out."""
    styles = {"ratio": "-", "rmfa": "--"}
    for number, construction in enumerate(dict.fromkeys(row.construction for row in rows)):
        for quantity, line in styles.items():
            curve = [
                row
                for row in rows
                if (row.construction, row.quantity) == (construction, quantity) and row.significant
            ]
            axes.errorbar(
                [row.num_features for row in curve],
                [row.bias for row in curve],
                yerr=[row.standard_error for row in curve],
                marker=".",
                color=f"C{number}",
                linestyle=line,
                label=f"{quantity}, {construction}",
            )
    counts = sorted({row.num_features for row in rows})
    axes.plot(counts, [1 / count for count in counts], color="black", linestyle="-.", label="1 / D")
    axes.set(title="bias", ylabel="share of attention\nminus averaging")


def _draw_tail(axes: Any, rows: Sequence[TailRow]) -> None:
    """A colour for each ε; above the line at 1 the bound says nothing."""
    for number, epsilon in enumerate(dict.fromkeys(row.epsilon for row in rows)):
        curve = [row for row in rows if row.epsilon == epsilon]
        counts = [row.num_features for row in curve]
        colour = f"C{number}"
        _curve(axes, [(row.num_features, row.entry) for row in curve], f"ε = {epsilon:g}", color=colour)
        axes.plot(counts, [row.bound for row in curve], color=colour, linestyle=":")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.plot([], [], color="grey", linestyle=":", label="the paper's bound")
    axes.set(title=f"P(error > ε), {rows[0].inputs}", ylim=(1e-6, 1e5))


def _draw_kernels(axes: Any, rows: Sequence[KernelRow]) -> None:
    # A logarithmic axis has no place for trigh, which is exp.
    from_exp = [row for row in rows if row.kernel == "exp" and not row.equal]
    for number, other in enumerate(dict.fromkeys(row.other for row in from_exp)):
        points = [(row.scale, row.of_signal) for row in from_exp if row.other == other]
        _curve(axes, points, f"{other} − exp", color=f"C{number}", linestyle="--", marker="s")
    axes.set(title="kernels", xlabel="scale", ylabel="share of exp\nminus averaging")


def _cost_panels(
    curves: Mapping[str, Sequence[SpeedRow | AttentionSpeed]], styles: Mapping[str, Any] | None = None
) -> tuple[Figure, Any]:
    """Time above, memory below, against the length, by direction from left to right."""
    quantities = {"median": ("seconds", 1.0), "memory": ("peak memory, MiB", 2**-20)}
    figure, panels = _panels(len(quantities), len(PASSES), sharey="row")
    for line, (quantity, (name, factor)) in zip(panels, quantities.items(), strict=True):
        for axes, direction in zip(line, PASSES, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for label, rows in curves.items():
                values = [(row.length, getattr(row, quantity)) for row in rows if row.direction == direction]
                points = [(x, y and y * factor) for x, y in values]
                _curve(axes, points, label, **(styles[label] if styles else {}))
            axes.set(title=direction)
        line[0].set_ylabel(name)
    _name_axes(panels, "tokens n")
    return figure, panels


def _styles(attentions: Iterable[str]) -> dict[str, dict[str, str]]:
    """A line for each attention: whole where it approximates softmax, dashed where it does not."""
    styles: dict[str, dict[str, str]] = {}
    used = Counter[bool]()
    for attention in dict.fromkeys(attentions):
        aim = approximates_softmax(attention)
        styles[attention] = {"color": f"C{used[aim]}", "linestyle": "-" if aim else "--", "marker": "."}
        used[aim] += 1
    return styles


def _panels(num_rows: int, num_columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure with a grid of axes, always two-dimensional."""
    figure = Figure(figsize=(1 + 2.8 * num_columns, 1 + 2.4 * num_rows), layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, **options)


def _curve(axes: Any, points: Iterable[tuple[Any, Any]], label: str, **style: Any) -> None:
    known = [(x, y) for x, y in points if y]
    axes.plot([x for x, _ in known], [y for _, y in known], **{"marker": "."} | style, label=label)


def _name_axes(panels: Any, x: str, y: str | None = None) -> None:
    for axes in panels[-1]:
        axes.set_xlabel(x)
    for axes in panels[:, 0] if y else []:
        axes.set_ylabel(y)


def _finish(figure: Figure, panels: Any, num_columns: int = 6) -> str:
    """The SVG text, the same for the same results whenever it is drawn."""
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    entries: dict[str, Any] = {}
    for axes in panels.flat:
        handles, labels = axes.get_legend_handles_labels()
        entries |= zip(labels, handles, strict=True)
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=num_columns, frameon=False
    )
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "schoenbat"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
