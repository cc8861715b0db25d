"""The figures and tables of these pages, from what commands wrote: ``python docs/figures.py``.

Reads JSON in docs/figures, benchmarks/results and results; writes docs/figures/*.svg, and the tables between
their markers in the pages.
"""

import importlib.util
import inspect
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

import schoenbat
from schoenbat import data, normalization
from schoenbat.files import write_atomically
from schoenbat.integrations import huggingface
from schoenbat.report.markdown import table
from schoenbat.report.pages import fill
from schoenbat.report.plots import scaling_plot

DOCS = Path(__file__).parent
FIGURES, ROOT = DOCS / "figures", DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
DRAWN_SCALES = 8.0
BOTH = "forward+backward"

Rows = list[dict[str, Any]]


def main() -> None:
    for name, drawn in figures().items():
        write_atomically(FIGURES / f"{name}.svg", drawn)
    for name, shown in tables().items():
        page = DOCS / f"{name}.md"
        write_atomically(page, fill(page.read_text(encoding="utf-8"), shown))


def figures() -> dict[str, str]:
    """SVG by the file's name."""
    return {
        "sharpness": _draw_sharpness(_read(FIGURES / "sharpness.json")),
        "time-cpu": _draw_times(_read(RESULTS / "cpu.json")),
    }


def _load(path: Path) -> Any:
    """A script as a module, without its neighbours on the path."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def tables() -> dict[str, dict[str, str]]:
    """Tables by the page and their name on it."""
    page, attentions = (_load(ROOT / "benchmarks" / name) for name in ("gpu_page.py", "cpu_page.py"))
    gpu = _read(RESULTS / "nvidia-h200.json")
    return {
        "choosing": {"sharpness": _sharpness_table(_read(FIGURES / "sharpness.json"))},
        "when-not": {
            "cpu": _crossover_table(_cpu_times(_read(RESULTS / "cpu.json")), "SDPA"),
            "gpu": _crossover_table(_gpu_times(gpu), "SDPA (cuDNN)"),
        },
        "gpu": {
            "gpu": page.speed_table(gpu),
            "rivals": page.rivals_table(gpu),
            "memory": page.memory_table(gpu),
            "training": page.training_table(),
        },
        "long-context": {
            "parallel": _parallel_table(_read(RESULTS / "parallel.json")),
            "charlm": _charlm_table(),
        },
        "converting": {"minilm": _minilm_table()},
        "comparison": {"attentions": attentions.attention_table()},
        "api": {"names": _names_table()},
    }


def _read(path: Path) -> Rows:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def _draw_sharpness(rows: Rows) -> str:
    """Relative error against D: scales from left to right, a curve for each construction."""
    scales = [scale for scale in _each(rows, "scale") if scale <= DRAWN_SCALES]
    figure = Figure(figsize=(1 + 1.6 * len(scales), 3), layout="constrained")
    panels = figure.subplots(1, len(scales), sharey=True)
    for axes, scale in zip(panels, scales, strict=True):
        for construction in _each(rows, "construction"):
            curve = [r for r in rows if (r["scale"], r["construction"]) == (scale, construction)]
            points = [r["num_features"] for r in curve], [r["relative"] for r in curve]
            axes.plot(*points, marker=".", label=construction)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set(title=f"scale {scale:g}", xlabel="features D", yscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("error / that of averaging")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "schoenbat"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _draw_times(rows: Rows) -> str:
    names = {"rmfa": "RMFA", "sdpa": "SDPA"}
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        panel = curves.setdefault(row["direction"], {})
        panel.setdefault(names[row["method"]], []).append((row["length"], row["median"]))
    return scaling_plot(curves)


def _sharpness_table(rows: Rows) -> str:
    found = {(r["scale"], r["construction"], r["num_features"]): r for r in rows}
    columns = [("paper", 128), ("unbiased", 128), ("exact-low", 128), ("exact-low", 512)]
    lines = []
    for scale in _each(rows, "scale"):
        cells = [found[scale, *column] for column in columns]
        lines.append([f"{scale:g}", f"{cells[0]['largest_weight']:.3f}", *(_relative(c) for c in cells)])
    return table(["scale", "largest weight", *(f"{name}, D = {count}" for name, count in columns)], lines)


def _cpu_times(rows: Rows) -> Iterable[tuple[str, float, float]]:
    """What was run, seconds of SDPA and of RMFA."""
    found = {(r["length"], r["method"]): r["median"] for r in rows if r["direction"] == BOTH}
    for length, method in found:
        if method == "rmfa" and found.get((length, "sdpa")):
            yield f"8 × {length:,}", found[length, "sdpa"], found[length, "rmfa"]


def _gpu_times(rows: Rows) -> Iterable[tuple[str, float, float, float]]:
    """The same, and how many times as fast a plain call is."""
    kind = ", 64, 128, exact-low"
    found = {(r["shape"], r["method"]): r for r in rows if r["direction"] == BOTH}
    for shape, method in found:
        if method == "triton" and shape.endswith(kind) and (shape, "cudnn") in found:
            theirs, ours = found[shape, "cudnn"], found[shape, "triton"]
            yield shape.removesuffix(kind), theirs["median"], ours["median"], theirs["call"] / ours["call"]


def _crossover_table(times: Iterable[tuple[Any, ...]], rival: str) -> str:
    lines = [
        [what, _milliseconds(theirs), _milliseconds(ours), *(f"{x:,.1f} ×" for x in (theirs / ours, *called))]
        for what, theirs, ours, *called in times
    ]
    heading = ["heads × n", f"{rival}, ms", "RMFA, ms", "faster by", "called"]
    return table(heading[: len(lines[0])], lines)


def _parallel_table(rows: Rows) -> str:
    most = max(row["processes"] for row in rows)
    chosen = [row for row in rows if row["processes"] == most and row["is_causal"]]
    lines = [
        [f"{row['length']:,}", f"{row['sent'] / 1024:,.1f}", f"{row['keys_and_values'] / 1024:,.0f}"]
        for row in chosen
    ]
    return table(["tokens", f"KiB that each of {most} ranks hands over", "KiB of its keys, values"], lines)


def _charlm_table() -> str:
    names = {"schoenbat": "SchoenbAt", "sdpa": "softmax (SDPA)"}
    lines = []
    for name in ("charlm", "charlm_64k"):
        content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
        options = content["options"]
        for row in content["rows"]:
            generation = [_milliseconds(step["seconds"]) for step in row["generation"]]
            lines.append(
                [
                    f"{options['context']:,}",
                    f"{options['steps']:,} × {options['batch']}",
                    names[row["attention"]],
                    f"{row['bits_per_byte']:.3f}",
                    f"{row['bytes_per_second'] / 1000:,.0f}",
                    f"{row['peak_memory'] / 2**30:.1f}",
                    generation[0],
                    generation[-1],
                ]
            )
    heading = ["context", "steps × crops", "attention", "bits per byte", "kB/s", "GiB"]
    return table([*heading, "ms a byte, first", "last"], lines)


def _minilm_table() -> str:
    lines = []
    for name in ("minilm", "minilm_window"):
        content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
        options, scores = content["options"], {}
        trained = f", {' + '.join(map(str, options['steps']))} steps of {options['batch']} texts"
        for row in content["rows"]:
            if row["stage"] != "original":
                attention = row["attention"].replace("window", f"window of ±{options['window']}")
                key = attention, row["stage"] + trained * (row["stage"] == "distilled")
                scores.setdefault(key, []).extend(f"{row[k]:.3f}" for k in ("cosine", "spearman"))
        lines += [[*key, *cells] for key, cells in scores.items()]
    corpora = ("reviews", "papers")
    return table(
        ["attention", "stage", *(f"{c}, {k}" for c in corpora for k in ("cosine", "rank correlation"))], lines
    )


def _names_table() -> str:
    """Every public name with the first sentence of its docstring, and where it is written."""
    names = [(package, name) for package in (schoenbat, huggingface, data) for name in package.__all__]
    names += [(schoenbat.parallel, "rmfa"), (normalization, "synchronize_statistics")]
    lines = []
    for package, name in names:
        found = inspect.unwrap(getattr(package, name))
        source = Path(inspect.getsourcefile(found) or "").relative_to(ROOT).as_posix()
        first = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        short = f"{package.__name__}.{name}".replace("schoenbat.integrations.", "")
        lines.append([f"[`{short}`](../{source})", first])
    return table(["name", "what it is"], lines)


def _relative(row: dict[str, Any]) -> str:
    return f"{row['relative']:,.0f}" if row["relative"] > 10 else f"{row['relative']:.2g}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds > 1e-2 else f"{1e3 * seconds:.3f}"


def _each(rows: Rows, name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


if __name__ == "__main__":
    main()
