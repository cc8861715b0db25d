"""RMFA on a GPU beside SDPA and the memory floor, in one run on the same tensors.

bfloat16. Every cell is timed by replaying a CUDA graph, and once more as a plain call, which pays for Python
and launches. The floor is the time to read query, key and value once and to write the output once (a
decoding step: to read and write the state once), at the speed at which this GPU copies memory. Where the
package fla is installed, its causal linear attention is measured on features that are ready-made: what it
would cost without a map.

Each pass of a shape is written to benchmarks/results/<gpu>.json as soon as it is measured, in place of what
was there of it: a row says of which revision it is, and what stands beside it was measured in the same run,
but for packages that are not installed any more. Passes of which this revision has rows already are left
alone, so that a run that was interrupted goes on. ``--causal`` measures causal attention alone, after its
kernels have changed; windows in both directions share some of them, and are not among it. ``--only TEXT``
measures the shapes in whose names TEXT stands, such as "unbiased" or "64, 128, exact-low".
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
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

from schoenbat import (
    MaclaurinFeatures,
    RMFAState,
    RMFAWindowState,
    SchoenbAt,
    kernelized_attention,
    rmfa,
    rmfa_step,
    rmfa_window,
    rmfa_window_step,
)
from schoenbat.experiments.measurement import peak_memory, time_call, time_replay
from schoenbat.report.results import device_name, write_results
from schoenbat.training.record import revision

DEVICE = torch.device("cuda")
FORWARD, BACKWARD = "forward", "forward+backward"
CAUSAL_FORWARD, CAUSAL_BACKWARD = "causal forward", "causal forward+backward"
DECODE = "decode"
PASSES = (FORWARD, BACKWARD, CAUSAL_FORWARD, CAUSAL_BACKWARD)
# Beyond this length SDPA is measured forward and by cuDNN alone: more would take minutes.
LONGEST_SDPA = 2**16
HEADS = 8

Attention = Callable[..., Tensor]
Inputs = list[Tensor]


@dataclass(frozen=True)
class Shape:
    """Batch × heads, length, head dimension, features and construction of one group of rows."""

    sequences: int
    length: int
    head_dim: int = 64
    num_features: int = 128
    construction: str = "exact-low"
    scale: float | None = None

    def __str__(self) -> str:
        return (
            f"{self.sequences} × {self.length:,}, {self.head_dim}, {self.num_features}, {self.construction}"
        )

    def features(self) -> MaclaurinFeatures:
        options = {"construction": self.construction, "scale": self.scale, "seed": 0, "device": DEVICE}
        return MaclaurinFeatures(self.head_dim, self.num_features, **options)


SHAPES = (
    Shape(128, 512),
    Shape(128, 1024),
    Shape(128, 4096),
    Shape(32, 16_384),
    Shape(8, 262_144),
    Shape(32, 4096, head_dim=32),
    Shape(32, 16_384, head_dim=128, num_features=256),
    Shape(32, 16_384, construction="unbiased", scale=4.0),
)
# One batch of ever longer sequences: what the plot of time against length shows.
LENGTHS = tuple(Shape(16, 2**exponent) for exponent in range(8, 18))
DECODING = Shape(64 * HEADS, 1)
# Where a window is measured beside attention without one, and the module beside the function.
WINDOWED, WIDTH = Shape(32, 16_384), 64


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
    revision: str | None
    torch: str


@dataclass(frozen=True)
class Cell:
    shape: Shape
    method: str
    attention: Attention
    direction: str
    prepare: Callable[[Inputs], Inputs] | None = None
    """What is made of the inputs before time is taken."""

    def call(self, inputs: Inputs) -> Callable[[], object]:
        inputs = inputs if self.prepare is None else self.prepare(inputs)
        attend = partial(self.attention, is_causal=self.direction.startswith("causal"))
        return partial(_backward if self.direction.endswith("backward") else _forward, attend, inputs)


def cells(shape: Shape) -> list[Cell]:
    """What is measured on a shape."""
    features = shape.features()
    methods: dict[str, Attention] = {
        name: partial(rmfa, features=features, implementation=name) for name in ("triton", "eager")
    }
    methods |= {name: partial(_sdpa, name) for name in ("cudnn", "flash")}
    if shape == WINDOWED:
        window = partial(rmfa_window, features=features, width=WIDTH)
        methods |= {
            f"{name}, ±{WIDTH} exact": partial(window, implementation=name) for name in ("triton", "eager")
        }
        methods["module"] = _module(shape)
    measured = [Cell(shape, name, call, way) for name, call in methods.items() for way in passes_of(shape)]
    if shape.head_dim == 64 and shape.construction == "exact-low" and shape in SHAPES:
        exact = partial(kernelized_attention, kernel="inv")
        measured.append(Cell(shape, "exact inv by FlexAttention", exact, FORWARD))
        if importlib.util.find_spec("fla"):
            ready = partial(_ready_made, features)
            measured += [Cell(shape, "fla", _fla, way, ready) for way in (CAUSAL_FORWARD, CAUSAL_BACKWARD)]
    return [cell for cell in measured if not _takes_minutes(cell)]


def _takes_minutes(cell: Cell) -> bool:
    if cell.shape in LENGTHS and cell.method in ("eager", "flash"):
        return True
    if cell.shape.length <= LONGEST_SDPA or cell.method == "triton":
        return False
    return (cell.method, cell.direction) not in (("cudnn", FORWARD), ("eager", FORWARD), ("eager", BACKWARD))


def passes_of(shape: Shape) -> tuple[str, ...]:
    if shape == DECODING:
        return (DECODE,)
    return (FORWARD, BACKWARD) if shape in LENGTHS else PASSES


def rows(shape: Shape, direction: str, copy_speed: float) -> Iterator[Row]:
    """One pass by all methods."""
    if shape == DECODING:
        yield from decoding_rows(copy_speed)
        return
    inputs = _draw(shape)
    floor = 4 * inputs[0].nbytes / copy_speed
    for cell in cells(shape):
        if cell.direction == direction:
            yield measure(str(shape), cell.method, direction, cell.call(inputs), floor)


def decoding_rows(copy_speed: float) -> Iterator[Row]:
    """One token for each of 64 sequences, without a window and with one."""
    features, inputs = DECODING.features(), [x.detach() for x in _draw(DECODING)]
    sizes = inputs[0].shape[0], HEADS, DECODING.head_dim
    far = RMFAState.zeros(features, *sizes)
    near = RMFAWindowState.zeros(features, WIDTH, *sizes, dtype=inputs[0].dtype)
    far_bytes = sum(x.nbytes for x in vars(far).values())
    near_bytes = far_bytes + sum(x.nbytes for x in (near.key, near.value, near.mask))
    for name in ("triton", "eager"):
        for method, call, state, size in (
            (name, rmfa_step, far, far_bytes),
            (f"{name}, ±{WIDTH} exact", rmfa_window_step, near, near_bytes),
        ):
            step = torch.no_grad()(partial(call, *inputs, features, state, implementation=name))
            yield measure(str(DECODING), method, DECODE, step, 2 * size / copy_speed)


def measure(shape: str, method: str, direction: str, call: Callable[[], object], floor: float) -> Row:
    plain = time_call(call, DEVICE, seconds=0.1, max_repetitions=20)
    timing = time_replay(call)
    quantiles = {name: asdict(timing)[name] for name in ("median", "low", "high")}
    memory = peak_memory(call, DEVICE)
    return Row(
        *(shape, method, direction),
        **quantiles,
        call=plain.median,
        floor=floor,
        memory=memory,
        revision=revision(),
        torch=torch.__version__,
    )


def _module(shape: Shape) -> Attention:
    """What a model has: attention between pre-SBN and post-SBN, at a learned scale."""
    options = {"construction": shape.construction, "seed": 0, "device": DEVICE, "dtype": torch.bfloat16}
    return SchoenbAt(shape.head_dim, HEADS, shape.num_features, **options)


def _sdpa(backend: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    with sdpa_kernel(getattr(SDPBackend, f"{backend.upper()}_ATTENTION")):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _fla(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    assert is_causal
    return chunk_linear_attn(query, key, value)[0]


@torch.no_grad()
def _ready_made(features: MaclaurinFeatures, inputs: Inputs) -> Inputs:
    """Features of queries and keys, and values, as fla lays them out: ``(B, n, H, ·)``."""
    query, key, value = inputs
    rows = *(features(features.scale**0.5 * x) for x in (query, key)), value
    return [x.transpose(1, 2).to(value.dtype).contiguous().requires_grad_() for x in rows]


def _draw(shape: Shape) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = shape.sequences // HEADS, HEADS, shape.length, shape.head_dim
    query, key, value = (torch.randn(size, generator=generator, device=DEVICE) for _ in range(3))
    tensors = F.normalize(query, dim=-1), F.normalize(key, dim=-1), value
    return [x.to(torch.bfloat16).requires_grad_() for x in tensors]


@torch.no_grad()
def _forward(attention: Attention, inputs: Inputs) -> None:
    attention(*inputs)


def _backward(attention: Attention, inputs: Inputs) -> None:
    torch.autograd.grad(attention(*inputs), inputs, inputs[2].detach())


def _copy_speed() -> float:
    """Bytes moved a second, reads and writes together, by a copy far larger than the cache."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_call(partial(target.copy_, source), DEVICE, seconds=0.3).median


def table(measured: list[Row]) -> Table:
    """Ours in milliseconds, as a multiple of the floor, and beside the others."""
    shown = Table("B·H × n, d, D", "pass", "ms", "floors", "× cuDNN", "× flash", "× eager", "× fla")
    found = {(row.shape, row.method, row.direction): row for row in measured}
    for (shape, method, direction), row in found.items():
        if not method.startswith("triton"):
            continue
        form = method.removeprefix("triton")  # nothing, or a window
        names = "cudnn", "flash", f"eager{form}", "" if form else "fla"
        rivals = [found.get((shape, rival, direction)) for rival in names]
        ratios = ["" if rival is None else f"{rival.median / row.median:.1f}" for rival in rivals]
        floors = f"{row.median / row.floor:.2f}" if direction in (FORWARD, DECODE) else ""
        shown.add_row(shape, direction + form, f"{1000 * row.median:.3f}", floors, *ratios)
    return shown


def measured_before(path: Path) -> dict[str, list[Row]]:
    """The rows of the result file, by shape."""
    found: dict[str, list[Row]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []:
        found.setdefault(row["shape"], []).append(Row(**row))
    return found


def is_of(rows: list[Row], direction: str, own: str | None) -> bool:
    """Whether a pass was measured at this revision, and it is one: not if files were changed since."""
    found = {row.revision for row in rows if (row.method, row.direction) == ("triton", direction)}
    return own is not None and not own.endswith("+") and found == {own}


def renewed(rows: list[Row], measured: list[Row]) -> list[Row]:
    """All rows of a shape, those that were measured anew in the place of the old ones."""
    return list({(row.method, row.direction): row for row in (*rows, *measured)}.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--causal", action="store_true", help="measure the passes of causal attention alone")
    parser.add_argument("--only", metavar="TEXT", default="", help="measure shapes with TEXT in their names")
    asked = parser.parse_args(arguments)
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; benchmarks/cpu.py measures a CPU")
    console, shapes = Console(width=120), (*SHAPES, *LENGTHS, DECODING)
    wanted = [shape for shape in shapes if asked.only in str(shape)]
    if not wanted:
        parser.error(f"no shape has {asked.only!r} in its name; there are: {'; '.join(map(str, shapes))}")
    name = device_name(DEVICE).lower().replace(" ", "-")
    path = Path(__file__).parent / "results" / f"{name}.json"
    found, own, speed = measured_before(path), revision(), _copy_speed()
    for shape in track(wanted, "measuring", console=console, auto_refresh=False):
        start, before = time.perf_counter(), found.setdefault(str(shape), [])
        for direction in passes_of(shape):
            if (direction.startswith("causal") or not asked.causal) and not is_of(before, direction, own):
                found[str(shape)] = renewed(found[str(shape)], list(rows(shape, direction, speed)))
                write(path, found, shapes)
        console.print(f"{shape}: {time.perf_counter() - start:.0f} s")
    console.print(table([row for shape in wanted for row in found[str(shape)]]))


def write(path: Path, found: dict[str, list[Row]], shapes: Sequence[Shape]) -> None:
    """In the order of the shapes, whichever were measured last."""
    options = {"shapes": [asdict(shape) for shape in shapes]}
    listed = [row for shape in shapes for row in found.get(str(shape), [])]
    write_results(path, "gpu", options, listed, device=DEVICE)


if __name__ == "__main__":
    main()
