"""Speed and memory on this machine's CPU beside SDPA's, in one run: ``python benchmarks/cpu.py``.

float32, one sequence, 8 heads, d = 64, D = 128, exact-low. SDPA is left out where a call would take minutes.
Writes benchmarks/results/cpu.json.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from schoenbat.experiments.speed import SpeedOptions, SpeedRow, run
from schoenbat.report.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu.json"
OPTIONS = SpeedOptions(
    kernels=("exp",),
    lengths=(1024, 4096, 16_384, 65_536),
    num_features=(128,),
    rivals=("sdpa",),
    head_dim=64,
    seconds=2.0,
    budget=40.0,
)


def table(rows: list[SpeedRow]) -> Table:
    """Times, their ratio, and peak memory as a multiple of query, key, value and output together."""
    found = {(row.method, row.length, row.direction): row for row in rows}
    shown = Table("n", "pass", "SDPA ms", "RMFA ms", "faster by", "RMFA memory / (q, k, v, out)")
    for (method, length, direction), row in found.items():
        if method != "rmfa" or row.median is None:
            continue
        sdpa = found["sdpa", length, direction].median
        tensors = 4 * OPTIONS.num_heads * length * OPTIONS.head_dim * 4
        shown.add_row(
            f"{length:,}",
            direction,
            "" if sdpa is None else f"{1000 * sdpa:,.1f}",
            f"{1000 * row.median:,.1f}",
            "" if sdpa is None else f"{sdpa / row.median:.1f} ×",
            "" if row.memory is None else f"{row.memory / tensors:.2f}",
        )
    return shown


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    measured = list(track(run(OPTIONS), "measuring", total=OPTIONS.total, auto_refresh=False))
    write_results(RESULTS, "cpu", OPTIONS, measured)
    Console(width=100).print(table(measured))
