"""Tables that no GPU is needed for; ``python benchmarks/cpu_page.py`` writes the README's.

Reads speed-attentions.json and error-attentions.json in benchmarks/results.
"""

import json
from pathlib import Path
from typing import Any

from schoenbat.experiments.comparison import AttentionError, AttentionSpeed, growth
from schoenbat.experiments.measurement import BACKWARD
from schoenbat.files import write_atomically
from schoenbat.report.markdown import table
from schoenbat.report.pages import fill

HERE = Path(__file__).parent
PAGE = HERE.parent / "README.md"
ROUNDING = 1e-5
OURS = {
    "softmax": "softmax (SDPA)",
    "schoenbat": "`SchoenbAt`, as it comes",
    "schoenbat:construction=exact-low": '`SchoenbAt(construction="exact-low")`',
}


def main() -> None:
    write_atomically(PAGE, fill(PAGE.read_text(encoding="utf-8"), tables()))


def tables() -> dict[str, str]:
    """By the name of their markers in the README."""
    return {"cpu": module_table()}


def module_table() -> str:
    """A training step of the modules beside SDPA: time by the length, and memory at the longest."""
    speeds = [AttentionSpeed(**row) for row in _read("speed-attentions")["rows"]]
    both = {(row.attention, row.length): row for row in speeds if row.direction == BACKWARD}
    lengths = sorted({length for _, length in both})
    lines = []
    for attention, name in OURS.items():
        rows = [both[attention, length] for length in lengths]
        memory = f"{rows[-1].memory / 2**20:,.0f}"
        lines.append([name, *(f"{1e3 * row.median:,.1f}" for row in rows), memory])
    heading = ["forward+backward", *(f"ms, n = {length:,}" for length in lengths)]
    return table([*heading, f"MiB, n = {lengths[-1]:,}"], lines)


def attention_table() -> str:
    """Time and memory of forward and backward, their growth, and the distance to softmax."""
    speeds = [AttentionSpeed(**row) for row in _read("speed-attentions")["rows"]]
    errors = [AttentionError(**row) for row in _read("error-attentions")["rows"]]
    both = {(row.attention, row.length): row for row in speeds if row.direction == BACKWARD}
    distance = {(row.attention, row.length): row for row in errors}
    lengths = sorted({length for _, length in both})
    shown = lengths[0], lengths[-1]
    compared = sorted({length for _, length in distance})
    lines = []
    for attention in dict.fromkeys(name for name, _ in both):
        first, last = (both[attention, length] for length in shown)
        # What takes no memory at any length does not grow.
        powers = [growth(speeds, attention, name, BACKWARD) or 0.0 for name in ("median", "memory")]
        far = [distance[attention, length] for length in (compared[0], compared[-1])]
        lines.append(
            [
                attention,
                *("" if row.median is None else f"{1e3 * row.median:,.1f}" for row in (first, last)),
                f"{powers[0]:.2f}",
                "" if last.memory is None else f"{last.memory / 2**20:,.1f}",
                f"{powers[1]:.2f}",
                *(_error(row) for row in far),
            ]
        )
    return table(
        [
            "attention",
            *(f"ms, n = {length:,}" for length in shown),
            "growth of time",
            f"MiB, n = {shown[1]:,}",
            "growth of memory",
            *(f"error, n = {length:,}" for length in (compared[0], compared[-1])),
        ],
        lines,
    )


def _error(row: AttentionError) -> str:
    # Softmax in another order of summation is off by rounding alone.
    shown = f"{row.error:.2g}" if row.error > ROUNDING else "0"
    return shown if row.approximates_softmax else f"{shown} *"


def _read(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
