"""How far RMFA is from exact kernelized attention: the paper's figure of approximation errors.

Q, K and V are standard normal, the tokens of Q and K are normalised as by pre-SBN, scale 1/√d, γ = β = 1.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import kernelized_attention, rmfa
from schoenbat.kernels import kernel as get_kernel
from schoenbat.normalization import PreSBN
from schoenbat.options import check_seed

# The heads of one map share their degrees, so the repetitions are spread over several maps.
MAPS = 10
FIRST_MAP_SEED = 1_000_000
"""Drawn with the same seed, a map would get the very numbers that the queries are made of."""


@dataclass(frozen=True)
class ErrorOptions:
    """What is compared; the defaults are the paper's."""

    kernels: tuple[str, ...] = ("exp", "inv", "logi", "trigh", "sqrt")
    constructions: tuple[str, ...] = ("paper", "paper-code", "unbiased", "exact-low")
    head_dims: tuple[int, ...] = (10, 50, 100, 150, 200)
    num_features: tuple[int, ...] = (10, 20, 30, 40, 50)
    num_tokens: int = 100
    repetitions: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for kernel in self.kernels:
            get_kernel(kernel)
        if self.repetitions < 2:
            raise ValueError(f"a standard error needs at least 2 repetitions, got {self.repetitions}")

    @classmethod
    def quick(cls, **options: Any) -> "ErrorOptions":
        """A corner of the figure that takes seconds."""
        grid: dict[str, Any] = {"head_dims": (10, 50, 200), "num_features": (10, 30, 50), "repetitions": 20}
        return cls(**grid | options)

    @property
    def total(self) -> int:
        """How many rows `run` yields."""
        grid = self.kernels, self.constructions, self.head_dims, self.num_features
        return math.prod(map(len, grid))


@dataclass(frozen=True)
class ErrorRow:
    """One point of the figure."""

    kernel: str
    construction: str
    head_dim: int
    num_features: int
    error: float
    """Mean absolute difference to kernelized attention."""
    standard_error: float
    """Of ``error``, over the maps: what repetitions with one map have in common does not average out."""
    relative: float
    """``error`` divided by that of plain averaging of V: above 1 is worse than no attention at all."""


def run(options: ErrorOptions) -> Iterator[ErrorRow]:
    """Measure every combination of the options, each repetition with inputs and a map of its own.

    >>> row, = run(ErrorOptions(("exp",), ("exact-low",), (10,), (50,), repetitions=10))
    >>> row.relative < 0.1
    True
    """
    for head_dim in options.head_dims:
        query, key, value = _draw_inputs(options, head_dim)
        for kernel in options.kernels:
            exact = kernelized_attention(query, key, value, kernel)
            averaging = (exact - value.mean(-2, keepdim=True)).abs().mean()
            for construction, num_features in itertools.product(options.constructions, options.num_features):
                approximate = _approximate(
                    query, key, value, kernel, construction, num_features, options.seed
                )
                errors = (approximate - exact).abs().mean((-2, -1))  # one for each repetition
                of_maps = torch.stack([part.mean() for part in errors.split(_share(options.repetitions))])
                yield ErrorRow(
                    kernel=kernel,
                    construction=construction,
                    head_dim=head_dim,
                    num_features=num_features,
                    error=errors.mean().item(),
                    standard_error=of_maps.std().item() / math.sqrt(len(of_maps)),
                    relative=(errors.mean() / averaging).item(),
                )


def _draw_inputs(options: ErrorOptions, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value ``(repetitions, tokens, head_dim)``, each repetition in the place of a head."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = options.repetitions, options.num_tokens, head_dim
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    normalize = PreSBN("token")
    return normalize(query), normalize(key), value


def _approximate(
    query: Tensor, key: Tensor, value: Tensor, kernel: str, construction: str, num_features: int, seed: int
) -> Tensor:
    heads = _share(len(query))
    outputs = []
    parts = zip(query.split(heads), key.split(heads), value.split(heads), strict=True)
    for index, (some_queries, some_keys, some_values) in enumerate(parts):
        features = MaclaurinFeatures(
            query.shape[-1],
            num_features,
            kernel,
            construction=construction,
            num_heads=len(some_queries),
            seed=FIRST_MAP_SEED + seed * MAPS + index,
        )
        outputs.append(rmfa(some_queries, some_keys, some_values, features))
    return torch.cat(outputs)


def _share(repetitions: int) -> int:
    """How many of them have a map in common."""
    return math.ceil(repetitions / MAPS)
