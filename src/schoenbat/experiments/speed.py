"""How fast RMFA is beside attention of quadratic cost: the paper's speed-up figure, and the crossover.

The rivals are exact kernelized attention, as in the paper, and PyTorch's own softmax attention (SDPA), which
is what a user has otherwise. On a GPU rows are bfloat16, and what is timed is the work of the GPU: short
sequences take it less time than Python takes to ask for it.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.experiments.measurement import (
    PASSES,
    Attention,
    available_memory,
    make_call,
    peak_memory,
    time_call,
    time_replay,
)
from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import kernelized_attention, rmfa
from schoenbat.kernels import kernel as get_kernel
from schoenbat.normalization import PreSBN
from schoenbat.options import check_device, check_seed

CONSTRUCTION = "exact-low"
# How many n × n matrices exact attention may hold at once where it is written in plain PyTorch.
EXACT_MATRICES = 6


@dataclass(frozen=True)
class SpeedOptions:
    """What is measured; the defaults are the paper's figure."""

    kernels: tuple[str, ...] = ("exp", "inv", "logi", "trigh", "sqrt")
    lengths: tuple[int, ...] = (1000, 2000, 3000, 4000, 5000)
    num_features: tuple[int, ...] = (2, 10, 20, 40, 80, 120)
    rivals: tuple[str, ...] = ("exact", "sdpa")
    head_dim: int = 50
    num_heads: int = 8
    device: str = "cpu"
    seconds: float = 0.3
    """How long each cell is repeated."""
    budget: float = 10.0
    """A quadratic rival is left out where one call is expected to take more seconds than this."""
    seed: int = 0
    dtype: str = field(init=False)
    """What the device is fast in."""
    timed: str = field(init=False)
    """``"replay"`` of a CUDA graph, or ``"call"``."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        on_gpu = check_device(self.device).type == "cuda"
        object.__setattr__(self, "dtype", "bfloat16" if on_gpu else "float32")
        object.__setattr__(self, "timed", "replay" if on_gpu else "call")
        for kernel in self.kernels:
            get_kernel(kernel)

    @classmethod
    def quick(cls, **options: Any) -> "SpeedOptions":
        """A corner of the figure that takes seconds."""
        grid: dict[str, Any] = {
            "kernels": ("exp", "inv"),
            "lengths": (1000, 2000),
            "num_features": (10, 40, 120),
            "seconds": 0.1,
        }
        return cls(**grid | options)

    @classmethod
    def long(cls, longest: int = 131_072, **options: Any) -> "SpeedOptions":
        """Powers of two from 256, for the length from which RMFA is faster than SDPA."""
        grid: dict[str, Any] = {
            "kernels": ("exp",),
            "lengths": tuple(2**i for i in range(8, longest.bit_length())),
            "num_features": (128,),
            "rivals": ("sdpa",),
            "head_dim": 64,
        }
        return cls(**grid | options)

    @property
    def total(self) -> int:
        """How many rows `run` yields."""
        exact, sdpa = "exact" in self.rivals, "sdpa" in self.rivals
        each_length = sdpa + len(self.kernels) * (exact + len(self.num_features))
        return len(PASSES) * len(self.lengths) * each_length


@dataclass(frozen=True)
class SpeedRow:
    """Seconds and bytes of one call; None where it was not measured."""

    method: str
    """``"rmfa"``, ``"exact"`` or ``"sdpa"``."""
    kernel: str | None
    """None for SDPA, whose kernel is always exp."""
    length: int
    num_features: int | None
    direction: str
    """``"forward"`` or ``"forward+backward"``."""
    median: float | None = None
    low: float | None = None
    """The 20 % quantile."""
    high: float | None = None
    """The 80 % quantile."""
    repetitions: int = 0
    memory: int | None = None
    """Peak bytes beyond query, key and value."""


def run(options: SpeedOptions) -> Iterator[SpeedRow]:
    """Measure RMFA and its rivals at every combination of the options."""
    device = torch.device(options.device)
    shorter: dict[tuple[str, str | None, str], SpeedRow] = {}
    for length in options.lengths:
        inputs = _draw_inputs(options, length, device)
        for (method, kernel, num_features, attention), direction in itertools.product(
            _attentions(options), PASSES
        ):
            row = SpeedRow(method, kernel, length, num_features, direction)
            same = method, kernel, direction
            if method == "rmfa" or _affordable(row, shorter.get(same), options):
                row = _measure(row, attention, inputs, options)
            shorter[same] = row
            yield row


def speedup(rows: Sequence[SpeedRow], row: SpeedRow, against: str) -> float | None:
    """How many times faster ``row`` is than the rival on the same input; None where that was not measured."""
    rival = find_rival(rows, row, against)
    if rival is None or rival.median is None or row.median is None:
        return None
    return rival.median / row.median


def find_rival(rows: Sequence[SpeedRow], row: SpeedRow, against: str) -> SpeedRow | None:
    """The row of the rival on the same input as ``row``."""
    for rival in rows:
        same_input = (rival.length, rival.direction) == (row.length, row.direction)
        if rival.method == against and same_input and rival.kernel in (row.kernel, None):
            return rival
    return None


def crossover(rows: Sequence[SpeedRow], kernel: str | None, direction: str) -> int | None:
    """The least length from which on RMFA is faster than SDPA wherever both were measured; None if never."""
    speedups = over_sdpa(rows, kernel, direction)
    faster = itertools.takewhile(lambda length: speedups[length] > 1, sorted(speedups, reverse=True))
    return min(faster, default=None)


def over_sdpa(rows: Sequence[SpeedRow], kernel: str | None, direction: str) -> dict[int, float]:
    """The speed-up over SDPA by the length, wherever both were measured."""
    return {
        row.length: ratio
        for row in rows
        if (row.method, row.kernel, row.direction) == ("rmfa", kernel, direction)
        for ratio in [speedup(rows, row, "sdpa")]
        if ratio is not None
    }


def _draw_inputs(options: SpeedOptions, length: int, device: torch.device) -> list[Tensor]:
    """Query, key and value ``(1, H, length, d)``; unit rows, as kernels of finite radius need them."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = 1, options.num_heads, length, options.head_dim
    query, key, value = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
    normalize = PreSBN("token")
    rows, dtype = (normalize(query), normalize(key), value), getattr(torch, options.dtype)
    return [x.detach().to(dtype).requires_grad_() for x in rows]


def _attentions(options: SpeedOptions) -> Iterator[tuple[str, str | None, int | None, Attention]]:
    """Method, kernel, number of features and call of everything that is measured at one length."""
    if "sdpa" in options.rivals:
        yield "sdpa", None, None, F.scaled_dot_product_attention
    for kernel in options.kernels:
        if "exact" in options.rivals:
            yield "exact", kernel, None, partial(kernelized_attention, kernel=kernel)
        for num_features in options.num_features:
            features = MaclaurinFeatures(
                options.head_dim,
                num_features,
                kernel,
                construction=CONSTRUCTION,
                seed=options.seed,
                device=options.device,
            )
            yield "rmfa", kernel, num_features, partial(rmfa, features=features)


def _affordable(row: SpeedRow, shorter: SpeedRow | None, options: SpeedOptions) -> bool:
    """Whether a quadratic rival should be measured, by its time at the length before and by its memory."""
    if shorter is not None:
        if shorter.median is None:
            return False
        if shorter.median * (row.length / shorter.length) ** 2 > options.budget:
            return False
    available = available_memory(torch.device(options.device))
    needed = EXACT_MATRICES * options.num_heads * row.length**2 * 4 if row.method == "exact" else 0
    return available is None or needed < available


def _measure(row: SpeedRow, attention: Attention, inputs: list[Tensor], options: SpeedOptions) -> SpeedRow:
    device = torch.device(options.device)
    call = make_call(row.direction, attention, inputs)
    if options.timed == "replay":
        with torch.cuda.device(device):
            timing = time_replay(call, seconds=options.seconds)
    else:
        timing = time_call(call, device, seconds=options.seconds)
    return replace(row, **asdict(timing), memory=peak_memory(call, device))
