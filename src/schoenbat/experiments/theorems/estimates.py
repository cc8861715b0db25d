"""Inputs of the checks, and RMFA's numerator and denominator apart, for many maps at once.

Rows of Q and K are standard normal, values uniform in [−1, 1], so that the bound's S is 1. All is float64.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.features import MaclaurinFeatures
from schoenbat.kernels import kernel as get_kernel
from schoenbat.normalization import PreSBN

VALUE_BOUND = 1.0


class Inputs(NamedTuple):
    query: Tensor  # (n_q, d)
    key: Tensor  # (n, d)
    value: Tensor  # (n, d)


class Sums(NamedTuple):
    """Both divided by n."""

    numerator: Tensor  # (..., n_q, d)
    denominator: Tensor  # (..., n_q, 1)

    @property
    def ratio(self) -> Tensor:
        return self.numerator / self.denominator


def draw_inputs(seed: int, num_tokens: int, head_dim: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    shape = num_tokens, head_dim
    query, key = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    value = torch.rand(shape, dtype=torch.float64, generator=generator)
    return Inputs(query, key, VALUE_BOUND * (2 * value - 1))


def normalised(inputs: Inputs) -> Inputs:
    """With rows of norm 1, as pre-SBN makes them."""
    normalize = PreSBN("token")
    return Inputs(normalize(inputs.query), normalize(inputs.key), inputs.value)


def resampled(features: MaclaurinFeatures, draws: int, seed: int) -> Iterator[MaclaurinFeatures]:
    """The same module ``draws`` times, each time with other maps.

    The heads of one draw share their degrees: what is averaged over them is one independent sample.
    """
    for draw in range(draws):
        features.resample(seed * draws + draw)
        yield features


def estimate(features: MaclaurinFeatures, inputs: Inputs) -> Sums:
    """RMFA's sums, those of each head's map: ``(heads, n, ·)``."""
    root = math.sqrt(features.scale)
    phi_query, phi_key = (
        features((x * root).expand(features.num_heads or 1, *x.shape)) for x in (inputs.query, inputs.key)
    )
    return _split(phi_query @ (phi_key.mT @ _with_ones(inputs.value)), len(inputs.key))


def exact(inputs: Inputs, kernel: str, scale: float | None = None) -> Sums:
    """What `estimate` estimates; scale None: 1/√d."""
    scale = scale or 1 / math.sqrt(inputs.query.shape[-1])
    scores = get_kernel(kernel)(scale * inputs.query @ inputs.key.mT)
    return _split(scores @ _with_ones(inputs.value), len(inputs.key))


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _with_ones(value: Tensor) -> Tensor:
    return torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)


def _split(sums: Tensor, count: int) -> Sums:
    return Sums(sums[..., :-1] / count, sums[..., -1:] / count)
