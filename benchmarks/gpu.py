"""RMFA on a GPU beside SDPA and the memory floor, in one run on the same tensors.

bfloat16. Every cell is timed by replaying a CUDA graph, and once more as a plain call, which pays for Python
and launches. The floor is the time to read query, key and value once and to write the output once, at the
speed at which this GPU copies memory. Writes benchmarks/results/<gpu>.json.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from schoenbat import MaclaurinFeatures, rmfa
from schoenbat.experiments.measurement import Timing, peak_memory, time_call
from schoenbat.report.results import device_name, write_results

DEVICE = torch.device("cuda")
FORWARD, BACKWARD = "forward", "forward+backward"
# Beyond this length SDPA is measured forward and by cuDNN alone: more would take minutes.
LONGEST_SDPA = 2**16
HEADS = 8

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Batch × heads, length, head dimension, features and construction of one group of rows."""

    sequences: int
    length: int
    head_dim: int
    num_features: int
    construction: str = "exact-low"
    scale: float | None = None

    def __str__(self) -> str:
        return (
            f"{self.sequences} × {self.length:,}, {self.head_dim}, {self.num_features}, {self.construction}"
        )


SHAPES = (
    Shape(128, 512, 64, 128),
    Shape(128, 1024, 64, 128),
    Shape(128, 4096, 64, 128),
    Shape(32, 16_384, 64, 128),
    Shape(8, 262_144, 64, 128),
    Shape(32, 4096, 32, 128),
    Shape(32, 16_384, 128, 256),
    Shape(32, 16_384, 64, 128, "unbiased", 4.0),
)


@dataclass(frozen=True)
class Row:
    """Seconds of one method on one shape; `call` is a plain call, the others are replays of a CUDA graph."""

    shape: str
    method: str
    direction: str
    median: float
    low: float
    high: float
    call: float
    floor: float
    memory: int | None


def rows(copy_speed: float) -> Iterator[Row]:
    for shape in SHAPES:
        inputs = _draw(shape)
        floor = 4 * inputs[0].nbytes / copy_speed
        for (method, attention), direction in _cells(shape):
            call = partial(_forward if direction == FORWARD else _backward, attention, inputs)
            plain = time_call(call, DEVICE, seconds=0.2, max_repetitions=20)
            timing = _time_graph(call)
            quantiles = {name: asdict(timing)[name] for name in ("median", "low", "high")}
            memory = peak_memory(call, DEVICE)
            yield Row(
                str(shape), method, direction, **quantiles, call=plain.median, floor=floor, memory=memory
            )


def _cells(shape: Shape) -> list[tuple[tuple[str, Attention], str]]:
    """What is measured on a shape; SDPA is left out where it takes a minute, its backward pass earlier."""
    cells = [
        ((name, attention), direction)
        for name, attention in _ours(shape)
        for direction in (FORWARD, BACKWARD)
    ]
    for name in ("cudnn", "flash"):
        sdpa = (name, partial(_sdpa, getattr(SDPBackend, f"{name.upper()}_ATTENTION")))
        cells += [(sdpa, FORWARD)] if name == "cudnn" or shape.length <= LONGEST_SDPA else []
        cells += [(sdpa, BACKWARD)] if shape.length <= LONGEST_SDPA else []
    return cells


def _ours(shape: Shape) -> list[tuple[str, Attention]]:
    options = {"construction": shape.construction, "scale": shape.scale, "seed": 0, "device": DEVICE}
    features = MaclaurinFeatures(shape.head_dim, shape.num_features, **options)
    return [(name, partial(rmfa, features=features, implementation=name)) for name in ("triton", "eager")]


def _sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value)


def _draw(shape: Shape) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = shape.sequences // HEADS, HEADS, shape.length, shape.head_dim
    query, key, value = (torch.randn(size, generator=generator, device=DEVICE) for _ in range(3))
    tensors = F.normalize(query, dim=-1), F.normalize(key, dim=-1), value
    return [x.to(torch.bfloat16).requires_grad_() for x in tensors]


@torch.no_grad()
def _forward(attention: Attention, inputs: list[Tensor]) -> None:
    attention(*inputs)


def _backward(attention: Attention, inputs: list[Tensor]) -> None:
    torch.autograd.grad(attention(*inputs), inputs, inputs[2].detach())


def _time_graph(call: Callable[[], object]) -> Timing:
    """Capture the call, which has been warmed up, and time its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return time_call(graph.replay, DEVICE, seconds=0.3, max_repetitions=50)


def _copy_speed() -> float:
    """Bytes moved a second, reads and writes together, by a copy far larger than the cache."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_call(partial(target.copy_, source), DEVICE, seconds=0.3).median


def table(measured: list[Row]) -> Table:
    """Ours in milliseconds, as a multiple of the floor, and beside the others."""
    shown = Table(
        "B·H × n, d, D", "pass", "ms", "floors", "× cuDNN", "× flash", "× eager", title="RMFA, fused"
    )
    found = {(row.shape, row.method, row.direction): row for row in measured}
    for (shape, method, direction), row in found.items():
        if method != "triton":
            continue
        rivals = [found.get((shape, rival, direction)) for rival in ("cudnn", "flash", "eager")]
        ratios = ["" if rival is None else f"{rival.median / row.median:.1f}" for rival in rivals]
        floors = f"{row.median / row.floor:.2f}" if direction == FORWARD else ""
        shown.add_row(shape, direction, f"{1000 * row.median:.3f}", floors, *ratios)
    return shown


if __name__ == "__main__":
    speed = _copy_speed()
    total = sum(len(_cells(shape)) for shape in SHAPES)
    measured = list(track(rows(speed), "measuring", total=total, auto_refresh=False))
    name = device_name(DEVICE).lower().replace(" ", "-")
    options = {"copy_bytes_per_second": speed, "shapes": [asdict(shape) for shape in SHAPES]}
    write_results(Path(__file__).parent / "results" / f"{name}.json", "gpu", options, measured, device=DEVICE)
    Console(width=120).print(table(measured))
