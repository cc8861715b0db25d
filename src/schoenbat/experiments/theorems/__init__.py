"""The paper's theorems, measured: one file for each question."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schoenbat.experiments.theorems.bias import QUANTITIES, BiasRow, measure_bias
from schoenbat.experiments.theorems.estimates import draw_inputs, normalised
from schoenbat.experiments.theorems.kernels import COMPARED, KernelRow, compare_kernels
from schoenbat.experiments.theorems.restoring import (
    METHODS,
    VALUES,
    FormulaRow,
    RestoringRow,
    evaluate_formula,
    restore,
)
from schoenbat.experiments.theorems.tail import TailRow, measure_pair, measure_rows
from schoenbat.options import check_seed

Row = BiasRow | TailRow | KernelRow | FormulaRow | RestoringRow


@dataclass(frozen=True)
class TheoremOptions:
    """What is measured, and with how many maps."""

    constructions: tuple[str, ...] = ("paper", "unbiased")
    num_features: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    head_dim: int = 16
    num_tokens: int = 32
    heads: int = 16
    """Maps a draw, which share its degrees."""
    draws: int = 512
    """How often degrees are drawn: the independent samples of a standard error."""
    epsilons: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    tail_features: tuple[int, ...] = (8, 32, 128, 512, 2048, 8192)
    tail_draws: int = 32
    pair_features: tuple[int, ...] = (16, 64, 256, 1024)
    pair_draws: int = 2000
    kernel_head_dim: int = 32
    kernel_tokens: int = 128
    scales: tuple[float, ...] = (0.5, 0.9)
    """Beside the paper's 1/√d; below 1, the radius of inv, logi and sqrt."""
    formula_tokens: tuple[int, ...] = (2, 8, 32)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.draws < 3:
            raise ValueError(f"the standard error of a bias needs at least 3 draws, got {self.draws}")

    @classmethod
    def quick(cls, **options: Any) -> "TheoremOptions":
        """Fewer maps and features: seconds."""
        fewer: dict[str, Any] = {
            "num_features": (8, 16, 32, 64),
            "draws": 128,
            "tail_features": (8, 128, 1024),
            "tail_draws": 4,
            "pair_features": (16, 64, 256),
            "pair_draws": 500,
        }
        return cls(**fewer | options)

    @property
    def total(self) -> int:
        """How many rows `run` yields."""
        bias = len(self.constructions) * len(self.num_features) * len(QUANTITIES)
        tail = (len(self.tail_features) + len(self.pair_features)) * len(self.epsilons)
        kernels = (1 + len(self.scales)) * math.comb(len(COMPARED), 2)
        return bias + tail + kernels + len(self.formula_tokens) + len(VALUES) * len(METHODS)


def run(options: TheoremOptions) -> Iterator[Row]:
    """All checks, one after the other.

    >>> rows = run(TheoremOptions.quick(num_features=(8,), tail_features=(8,), draws=3, pair_draws=3))
    >>> list(dict.fromkeys(row.check for row in rows))
    ['bias', 'tail', 'kernels', 'formula', 'restoring']
    """
    seed, epsilons = options.seed, options.epsilons
    inputs = normalised(draw_inputs(seed, options.num_tokens, options.head_dim))
    for construction, count in itertools.product(options.constructions, options.num_features):
        yield from measure_bias(
            inputs, construction, count, heads=options.heads, draws=options.draws, seed=seed
        )
    for count in options.tail_features:
        yield from measure_rows(
            inputs, count, epsilons, heads=options.heads, draws=options.tail_draws, seed=seed
        )
    for count in options.pair_features:
        yield from measure_pair(count, epsilons, draws=options.pair_draws, seed=seed)
    longer = draw_inputs(seed, options.kernel_tokens, options.kernel_head_dim)
    for scale in (1 / math.sqrt(options.kernel_head_dim), *options.scales):
        yield from compare_kernels(normalised(longer), scale)
    yield from evaluate_formula(options.head_dim, options.formula_tokens, seed)
    yield from restore(longer)
