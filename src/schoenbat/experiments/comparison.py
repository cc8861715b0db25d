"""All attentions side by side: what they cost, and how far they are from softmax, over the length.

Q, K and V are standard normal; the tokens of Q and K are normalised as by pre-SBN and made so long that the
logits ``⟨q, k⟩ / √d`` are ``logit_scale`` times a cosine: unit rows alone would leave softmax all but flat.
All attentions are as they start out, in eval mode, with what they draw at random fixed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schoenbat.experiments.error import FIRST_MAP_SEED
from schoenbat.experiments.measurement import PASSES, available_memory, make_call, peak_memory, time_call
from schoenbat.normalization import PreSBN
from schoenbat.options import check_device, check_seed
from schoenbat.registry import attention_names, build_attention, parse_attention, with_seed

OTHER_AIMS = ("reformer", "skyformer", "cosformer", "rfa", "mean", "none")
"""Attentions that approximate something else than ``softmax(QKᵀ/√d) V``, or nothing."""
_TRIAL_LENGTH = 16


@dataclass(frozen=True)
class ComparisonOptions:
    """What both comparisons share."""

    attentions: tuple[str, ...] = attention_names()
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    num_heads: int = 8
    head_dim: int = 64
    logit_scale: float = 4.0
    """Where the learned scale of `SchoenbAt` starts."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        inputs = _draw_inputs(self, _TRIAL_LENGTH, self.seed)
        for text in self.attentions:
            try:
                _build(text, self, self.seed)(*inputs)
            except TypeError as error:
                raise ValueError(f"attention {text!r}: {error}") from error


@dataclass(frozen=True)
class SpeedComparison(ComparisonOptions):
    """What `run_speed` measures."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    device: str = "cpu"
    seconds: float = 0.3
    """How long each cell is repeated."""
    budget: float = 10.0
    """A cell is left out where one call is expected to take more seconds than this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)

    @classmethod
    def quick(cls, **options: Any) -> "SpeedComparison":
        """Short sequences, in seconds."""
        grid: dict[str, Any] = {"lengths": (256, 512, 1024), "seconds": 0.1}
        return cls(**grid | options)

    @property
    def total(self) -> int:
        """How many rows `run_speed` yields."""
        return len(self.lengths) * len(self.attentions) * len(PASSES)


@dataclass(frozen=True)
class ErrorComparison(ComparisonOptions):
    """What `run_error` compares."""

    repetitions: int = 10
    """Inputs, and maps or samples of the attentions, for each cell."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repetitions < 2:
            raise ValueError(f"a standard error needs at least 2 repetitions, got {self.repetitions}")

    @classmethod
    def quick(cls, **options: Any) -> "ErrorComparison":
        """Short sequences, in seconds."""
        grid: dict[str, Any] = {"lengths": (64, 128, 256), "repetitions": 4}
        return cls(**grid | options)

    @property
    def total(self) -> int:
        """How many rows `run_error` yields."""
        return len(self.lengths) * len(self.attentions)


@dataclass(frozen=True)
class AttentionSpeed:
    """Seconds and bytes of one call; None where it was not measured."""

    attention: str
    length: int
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


@dataclass(frozen=True)
class AttentionError:
    """Distance to softmax attention on the same inputs."""

    attention: str
    length: int
    error: float
    """``mean |out − softmax| / mean |softmax − mean V|``: 0 is softmax, 1 as far as plain averaging."""
    standard_error: float
    """Of ``error``, over the repetitions."""
    approximates_softmax: bool
    """Where False, ``error`` is a distance between two methods and says nothing of an approximation."""


def approximates_softmax(text: str, logit_scale: float = ComparisonOptions.logit_scale) -> bool:
    """Whether an attention approximates ``softmax(QKᵀ/√d) V`` on the inputs of the comparison.

    >>> approximates_softmax("performer"), approximates_softmax("rfa"), approximates_softmax("mean")
    (True, False, False)
    >>> approximates_softmax("schoenbat:kernel=exp"), approximates_softmax("schoenbat:kernel=inv")
    (True, False)
    """
    name, options = parse_attention(text)
    own_scales = {"schoenbat": ("learned", logit_scale), "softmax": ("auto", None)}.get(name, ())
    return (
        name not in OTHER_AIMS
        and options.get("kernel", "exp") in ("exp", "trigh")
        and not any(options.get(option) for option in ("causal", "rotary", "head_norm"))
        and not (name == "softmax" and options.get("window") is not None)
        and ("scale" not in options or options["scale"] in own_scales)
    )


def run_speed(options: SpeedComparison) -> Iterator[AttentionSpeed]:
    """Measure every attention at every length, forward and with the gradients of inputs and parameters.

    >>> options = SpeedComparison(("mean",), (16,), seconds=0.0)
    >>> [row.direction for row in run_speed(options)]
    ['forward', 'forward+backward']
    """
    device = torch.device(options.device)
    shorter: dict[tuple[str, str], AttentionSpeed] = {}
    for length in options.lengths:
        inputs = [x.to(device).requires_grad_() for x in _draw_inputs(options, length, options.seed)]
        for text in options.attentions:
            attention = _build(text, options, options.seed).to(device)
            for direction in PASSES:
                row = AttentionSpeed(text, length, direction)
                if _affordable(row, shorter.get((text, direction)), options):
                    row = _measure(row, attention, inputs, options)
                shorter[text, direction] = row
                yield row


def run_error(options: ErrorComparison) -> Iterator[AttentionError]:
    """Compare every attention with softmax at every length, each repetition with inputs and maps of its own.

    A bare ``"schoenbat"`` stands for the plain approximation of softmax: its scale is the inputs'
    ``logit_scale``, without post-SBN. With options it is what they say.

    >>> row, = run_error(ErrorComparison(("mean",), (16,)))
    >>> round(row.error, 3)
    1.0
    """
    first = options.seed * options.repetitions
    for length in options.lengths:
        for text in options.attentions:
            plain = f"schoenbat:scale={options.logit_scale:g},post=false" if text == "schoenbat" else text
            errors = torch.tensor(
                [_relative_error(plain, options, length, first + i) for i in range(options.repetitions)]
            )
            yield AttentionError(
                attention=text,
                length=length,
                error=errors.mean().item(),
                standard_error=errors.std().item() / math.sqrt(options.repetitions),
                approximates_softmax=approximates_softmax(text, options.logit_scale),
            )


def growth(rows: Sequence[AttentionSpeed], attention: str, quantity: str, direction: str) -> float | None:
    """The power of n that ``"median"`` or ``"memory"`` grew by from the first to the last measured length.

    1 is linear, 2 quadratic; None where fewer than two lengths were measured.

    >>> rows = [AttentionSpeed("softmax", n, "forward", n * n / 1e6) for n in (100, 300)]
    >>> round(growth(rows, "softmax", "median", "forward"), 6)
    2.0
    """
    measured = {
        row.length: getattr(row, quantity)
        for row in rows
        if (row.attention, row.direction) == (attention, direction) and getattr(row, quantity)
    }
    if len(measured) < 2:
        return None
    first, last = min(measured), max(measured)
    return math.log(measured[last] / measured[first]) / math.log(last / first)


def _draw_inputs(options: ComparisonOptions, length: int, seed: int) -> list[Tensor]:
    """Query, key and value ``(1, H, length, d)``."""
    generator = torch.Generator().manual_seed(seed)
    shape = 1, options.num_heads, length, options.head_dim
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    normalize = PreSBN("token")
    norm = math.sqrt(options.logit_scale * math.sqrt(options.head_dim))
    return [norm * normalize(query), norm * normalize(key), value]


def _build(text: str, options: ComparisonOptions, seed: int) -> nn.Module:
    """The attention in eval mode; one that draws something and was given no seed gets this one."""
    text = with_seed(text, FIRST_MAP_SEED + seed)
    return build_attention(text, options.head_dim, options.num_heads, max(options.lengths)).eval()


def _affordable(row: AttentionSpeed, shorter: AttentionSpeed | None, options: SpeedComparison) -> bool:
    """Whether a cell should be measured, by time and memory at the length before; softmax is quadratic."""
    if shorter is None:
        return True
    if shorter.median is None:
        return False
    power = 2 if row.attention.startswith("softmax") else 1
    ratio = (row.length / shorter.length) ** power
    available = available_memory(torch.device(options.device))
    fits = available is None or (shorter.memory or 0) * ratio < available
    return fits and shorter.median * ratio <= options.budget


def _measure(
    row: AttentionSpeed, attention: nn.Module, inputs: list[Tensor], options: SpeedComparison
) -> AttentionSpeed:
    device = torch.device(options.device)
    call = make_call(row.direction, attention, inputs)
    timing = time_call(call, device, seconds=options.seconds)
    return replace(row, **asdict(timing), memory=peak_memory(call, device))


@torch.no_grad()
def _relative_error(text: str, options: ErrorComparison, length: int, seed: int) -> float:
    query, key, value = _draw_inputs(options, length, seed)
    exact = F.scaled_dot_product_attention(query, key, value)
    averaging = (exact - value.mean(-2, keepdim=True)).abs().mean()
    difference = (_build(text, options, seed)(query, key, value) - exact).abs().mean()
    return (difference / averaging).item()
