"""Is RMFA unbiased? Its numerator and its denominator are; a ratio of unbiased estimates is not."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.experiments.theorems.estimates import Inputs, estimate, exact, resampled
from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import rmfa

QUANTITIES = ("numerator", "denominator", "ratio", "rmfa")
# What a bias must exceed, in standard errors, to be called one.
SIGNIFICANT = 3.0


@dataclass(frozen=True)
class BiasRow:
    """What one quantity is off on average over maps.

    ``ratio`` is numerator / denominator as the paper writes it; ``rmfa`` is the library's function, whose
    denominator has a floor.
    """

    check: str
    construction: str
    head_dim: int
    num_features: int
    maps: int
    quantity: str
    bias: float
    """Root mean square over all entries, as a share of that of what is estimated (of outputs: of attention
    minus plain averaging), noise subtracted; 0 where the noise is larger."""
    standard_error: float
    """Of ``bias``; where that is 0, what it would have to exceed to show."""
    z: float
    """The square of ``bias`` in its own standard errors."""
    along: float
    """The part of the bias along what is estimated, with its sign: 0.1 makes attention 10 % too sharp."""
    along_standard_error: float
    floored: float
    """Share of rows whose denominator is below its floor, where ``rmfa`` is not ``ratio``."""

    @property
    def limit(self) -> float:
        """Two standard errors above ``bias``."""
        return self.bias + 2 * self.standard_error

    @property
    def significant(self) -> bool:
        """Whether there is a bias, seen in all entries or along what is estimated."""
        return max(self.z, abs(self.along) / self.along_standard_error) > SIGNIFICANT and self.bias > 0


def measure_bias(
    inputs: Inputs, construction: str, num_features: int, *, heads: int, draws: int, seed: int
) -> Iterator[BiasRow]:
    """One row for each quantity, with the kernel exp.

    Of an output's error that part is left out that is linear in numerator and denominator: its mean is zero
    where theirs are right, and it is most of the noise.
    """
    head_dim = inputs.query.shape[-1]
    features = MaclaurinFeatures(
        head_dim, num_features, construction=construction, num_heads=heads, seed=0, dtype=torch.float64
    )
    truth = exact(inputs, "exp")
    attention = truth.ratio
    signal = attention - inputs.value.mean(0)
    errors: list[list[Tensor]] = [[] for _ in QUANTITIES]
    floored = 0.0
    for drawn in resampled(features, draws, seed):
        sums = estimate(drawn, inputs)
        query, key, value = (x.expand(heads, -1, -1) for x in inputs)
        output = rmfa(query, key, value, drawn)
        linear = (sums.numerator - sums.denominator * attention) / truth.denominator
        of_outputs = (x - attention - linear for x in (sums.ratio, output))
        of_sums = (x - y for x, y in zip(sums, truth, strict=True))
        for collected, error in zip(errors, (*of_sums, *of_outputs), strict=True):
            collected.append(error.mean(0))
        floored += ((output - sums.ratio).abs().amax(-1) > 1e-9).double().mean().item() / draws
    for quantity, collected, estimated in zip(QUANTITIES, errors, (*truth, signal, signal), strict=True):
        samples, size = torch.stack(collected), estimated.square().sum()
        squared, deviation = squared_bias(samples / size.sqrt())
        bias = math.sqrt(max(0.0, squared))
        along = (samples * estimated).sum((1, 2)) / size
        yield BiasRow(
            check="bias",
            construction=construction,
            head_dim=head_dim,
            num_features=num_features,
            maps=draws * heads,
            quantity=quantity,
            bias=bias,
            standard_error=deviation / (2 * bias) if squared > deviation else math.sqrt(deviation),
            z=squared / deviation,
            along=along.mean().item(),
            along_standard_error=along.std().item() / math.sqrt(draws),
            floored=floored,
        )


def squared_bias(errors: Tensor) -> tuple[float, float]:
    """‖E error‖² and its standard error, from independent errors ``(draws, n, m)``.

    Only products of two different draws are averaged: the noise of a square does not average out. The
    standard error is the jackknife's.

    >>> squared_bias(torch.tensor([[[1.0]], [[2.0]], [[4.0]]]))[0]  # (1·2 + 1·4 + 2·4) / 3
    4.666...
    """
    draws = len(errors)
    flat = errors.double().flatten(1)
    total, squares = flat.sum(0), flat.square().sum(1)
    products = total.square().sum() - squares.sum()
    without_one = (products - 2 * flat @ total + 2 * squares) / ((draws - 1) * (draws - 2))
    deviation = (without_one - without_one.mean()).square().sum() * (draws - 1) / draws
    return (products / (draws * (draws - 1))).item(), deviation.sqrt().item()


class Decay(NamedTuple):
    """A bias falls like D^``power`` from ``first`` to ``last`` features."""

    power: float
    first: int
    last: int


def decay(rows: Sequence[BiasRow], construction: str, quantity: str) -> Decay | None:
    """How a bias falls in the end, from the last two that are significant; None below two of them.

    Where D is small, other terms weigh as much, and the map "unbiased" has not reached its complete linear
    part.
    """
    points = [
        row
        for row in rows
        if (row.construction, row.quantity) == (construction, quantity) and row.significant
    ]
    if len(points) < 2:
        return None
    first, last = points[-2:]
    power = math.log(last.bias / first.bias) / math.log(last.num_features / first.num_features)
    return Decay(power, first.num_features, last.num_features)
