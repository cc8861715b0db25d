"""What a layer costs on 8 to 1,024 GPUs, for 1 M to 100 M tokens: ``python benchmarks/scaling.py``.

A model, not a measurement: figures of one H200 (results/nvidia-h200.json) and links of stated speed. Writes
benchmarks/results/scaling.json and the tables of docs/scaling.md.
"""

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from schoenbat.files import write_atomically
from schoenbat.report.pages import fill
from schoenbat.report.results import write_results

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "scaling.json"
PAGE = HERE.parent / "docs" / "scaling.md"
SHAPE = "8 × 262,144, 64, 128, exact-low"  # the longest measured: launches are a small part of it
SOFTMAX_SHAPE = "32 × 16,384, 64, 128, exact-low"  # the longest at which cuDNN's backward pass was measured
BOTH = "forward+backward"


@dataclass(frozen=True)
class Machine:
    """Assumed links, each way for each GPU."""

    nvlink_bytes_per_second: float = 450e9  # NVLink 4 of an H200: 900 GB/s, both ways together (data sheet)
    infiniband_bytes_per_second: float = 50e9  # one NDR port of 400 Gb/s for each GPU (data sheet)
    attained: float = 0.8  # of a link's speed, by large messages; an assumption
    nvlink_seconds: float = 3e-6  # for one message within a node; an assumption
    infiniband_seconds: float = 8e-6  # between nodes; an assumption
    gpus_in_a_node: int = 8
    gpu_bytes: float = 141e9  # of an H200 (data sheet)

    def bandwidth(self, gpus: int) -> float:
        """Of the slowest link on the way round."""
        inside = gpus <= self.gpus_in_a_node
        return self.attained * (self.nvlink_bytes_per_second if inside else self.infiniband_bytes_per_second)

    def latency(self, gpus: int) -> float:
        return self.nvlink_seconds if gpus <= self.gpus_in_a_node else self.infiniband_seconds


@dataclass(frozen=True)
class Layer:
    """One attention layer, one sequence, bfloat16."""

    heads: int = 16
    head_dim: int = 64
    num_features: int = 128


@dataclass(frozen=True)
class Measured:
    """Of one GPU, forward and backward: seconds and bytes for each token and head; operations a second."""

    eager_seconds: float
    fused_seconds: float
    eager_bytes: float
    fused_bytes: float
    eager_call: float  # what launching takes, however few tokens there are
    fused_call: float
    softmax_flops: float
    softmax_bytes: float
    softmax_call: float


@dataclass(frozen=True)
class Row:
    gpus: int
    tokens: int
    eager_seconds: float
    fused_seconds: float
    sums_seconds: float  # of both, for the all-reduce
    prefix_seconds: float  # where it is causal, for the all-gather
    ring_seconds: float
    ring_waits: bool  # whether passing keys and values takes longer than computing
    rmfa_bytes: float
    prefix_bytes: float
    ring_bytes: float


def measured() -> Measured:
    rows = json.loads((HERE / "results" / "nvidia-h200.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["shape"], row["method"]): row for row in rows if row["direction"] == BOTH}
    tokens, softmax_tokens = 8 * 262_144, 32 * 16_384
    eager, fused, softmax = found[SHAPE, "eager"], found[SHAPE, "triton"], found[SOFTMAX_SHAPE, "cudnn"]

    def call(method: str) -> float:
        return min(row["call"] for (_, name), row in found.items() if name == method)

    return Measured(
        eager_seconds=eager["median"] / tokens,
        fused_seconds=fused["median"] / tokens,
        eager_bytes=eager["memory"] / tokens,
        fused_bytes=fused["memory"] / tokens,
        eager_call=call("eager"),
        fused_call=call("triton"),
        softmax_flops=softmax_operations(16_384, 64) * 32 / softmax["median"],
        softmax_bytes=softmax["memory"] / softmax_tokens,
        softmax_call=call("cudnn"),
    )


def softmax_operations(length: int, head_dim: int) -> float:
    """Of one head, forward (two products) and backward (five): 2·n²·d operations each."""
    return 7 * 2 * length**2 * head_dim


def state_bytes(layer: Layer) -> int:
    """What a rank hands over in one pass: the four sums of each head in float32, and the count."""
    monomials = layer.num_features - 1
    numbers = monomials * layer.head_dim + monomials + 2 * layer.head_dim
    return 4 * numbers * layer.heads


def sums_seconds(gpus: int, message: int, machine: Machine) -> float:
    """All-reduce by a tree, up and down, in the forward and in the backward pass."""
    steps = 2 * math.ceil(math.log2(gpus))
    return 2 * (2 * message / machine.bandwidth(gpus) + steps * machine.latency(gpus))


def prefix_seconds(gpus: int, message: int, machine: Machine) -> float:
    """All-gather of every rank's state by a ring, forward and backward: each adds up those it needs."""
    return 2 * (gpus - 1) * (message / machine.bandwidth(gpus) + machine.latency(gpus))


def ring_seconds(gpus: int, tokens: int, layer: Layer, machine: Machine, one: Measured) -> tuple[float, bool]:
    """P steps, each of them as long as its products or its message takes, whichever is longer.

    Forward hands on keys and values in bfloat16; backward those, and their gradients in float32.
    """
    shard = tokens / gpus * layer.heads
    step = softmax_operations(tokens, layer.head_dim) * layer.heads / gpus**2 / one.softmax_flops
    compute = max(step, one.softmax_call)
    bytes_of_both = shard * layer.head_dim * (2 * 2 + 2 * 2 + 2 * 4)
    passing = bytes_of_both / machine.bandwidth(gpus) + 2 * machine.latency(gpus)
    return gpus * max(compute, passing), passing > compute


def model(gpus: int, tokens: int, layer: Layer, machine: Machine, one: Measured) -> Row:
    shard, message = tokens / gpus * layer.heads, state_bytes(layer)
    ring, waits = ring_seconds(gpus, tokens, layer, machine, one)
    inputs = 3 * 2 * layer.head_dim
    # A ring holds the block it computes with and the one that arrives, and so of the gradients in float32.
    in_flight = 2 * (2 * 2 + 2 * 4) * layer.head_dim
    return Row(
        gpus,
        tokens,
        eager_seconds=max(shard * one.eager_seconds, one.eager_call),
        fused_seconds=max(shard * one.fused_seconds, one.fused_call),
        sums_seconds=sums_seconds(gpus, message, machine),
        prefix_seconds=prefix_seconds(gpus, message, machine),
        ring_seconds=ring,
        ring_waits=waits,
        rmfa_bytes=shard * (inputs + one.eager_bytes) + 2 * message,
        prefix_bytes=gpus * message,
        ring_bytes=shard * (inputs + one.softmax_bytes + in_flight),
    )


def rows() -> list[Row]:
    one, layer, machine = measured(), Layer(), Machine()
    return [
        model(gpus, tokens, layer, machine, one)
        for gpus in (8, 64, 1024)
        for tokens in (1_000_000, 10_000_000, 100_000_000)
    ]


def tables(modelled: Iterable[Row]) -> dict[str, str]:
    """The page's tables by name."""
    modelled = list(modelled)
    one, machine, layer = measured(), Machine(), Layer()
    times = [
        "| GPUs | tokens | RMFA, eager | RMFA, fused | of which sums | ring attention | ring / eager "
        "| ring / fused |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    memory = ["| GPUs | tokens | RMFA, eager | causal, states of all | ring attention |", "| ---: " * 5 + "|"]
    prefix = ["| GPUs | bytes received | seconds |", "| ---: " * 3 + "|"]
    for row in modelled:
        place = f"| {row.gpus:,} | {row.tokens // 10**6} M |"
        eager, fused = (s + row.sums_seconds for s in (row.eager_seconds, row.fused_seconds))
        times.append(
            f"{place} {_seconds(eager)} | {_seconds(fused)} | {_seconds(row.sums_seconds)} | "
            f"{_seconds(row.ring_seconds)}{' *' if row.ring_waits else ''} | "
            f"{_ratio(row.ring_seconds / eager)} | {_ratio(row.ring_seconds / fused)} |"
        )
        sizes = (row.rmfa_bytes, row.prefix_bytes, row.ring_bytes)
        cells = [_bytes(size) + (" †" if size > machine.gpu_bytes else "") for size in sizes]
        memory.append(f"{place} {' | '.join(cells)} |")
    for gpus, seconds, size in sorted({(r.gpus, r.prefix_seconds, r.prefix_bytes) for r in modelled}):
        received = 2 * (size - size / gpus)  # forward and backward, from all others
        prefix.append(f"| {gpus:,} | {_bytes(received)} | {_seconds(seconds)} |")
    names = {**asdict(machine), **asdict(layer), **asdict(one), "state_bytes": state_bytes(layer)}
    given = ["| constant | value |", "| --- | ---: |", *(f"| `{k}` | {v:,.4g} |" for k, v in names.items())]
    return {
        name: "\n".join(lines)
        for name, lines in (("times", times), ("memory", memory), ("prefix", prefix), ("given", given))
    }


def _seconds(value: float) -> str:
    if value >= 3600:
        return f"{value / 3600:,.1f} h"
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.2f} ms"


def _bytes(value: float) -> str:
    return f"{value / 1e9:,.2f} GB" if value >= 1e9 else f"{value / 1e6:,.2f} MB"


def _ratio(value: float) -> str:
    return f"{value:,.1f} ×" if value < 100 else f"{value:,.0f} ×"


def main() -> None:
    modelled = rows()
    options: dict[str, Any] = {
        part.__class__.__name__: asdict(part) for part in (Machine(), Layer(), measured())
    }
    write_results(RESULTS, "scaling", options, modelled)
    write_atomically(PAGE, fill(PAGE.read_text(encoding="utf-8"), tables(modelled)))
    print(tables(modelled)["times"])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
