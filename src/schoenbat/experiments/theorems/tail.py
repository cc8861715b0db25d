"""Does the paper's bound on P(|SchoenbAt − attention| > ε) hold, and where does it say anything?

    2D exp(−Dε² / (2S²d²)),  |V| ≤ S

Its proof takes an error of the whole for an error of some single feature, takes each feature's own ratio to
lie in [−Sd, Sd], which the ratio of signed sums does not, and applies to it Hoeffding's inequality for a mean
of D. So it is measured here as it stands, in its weakest reading: one entry of the output.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from schoenbat.experiments.theorems.estimates import VALUE_BOUND, Inputs, estimate, exact, resampled
from schoenbat.features import MaclaurinFeatures

# Logits ±0.9, inside the radius 1 of inv: rows of norm √0.9, for d = 1.
PAIR_SCALE = 0.9


@dataclass(frozen=True)
class TailRow:
    """The bound beside how often the error of the "paper" map exceeded ε."""

    check: str
    inputs: str
    """``rows``: normalised random rows; ``pair``: one query and two opposed keys."""
    kernel: str
    head_dim: int
    num_features: int
    epsilon: float
    maps: int
    bound: float
    """At 1 or above it says nothing."""
    informative_from: int
    """The number of features from which on the bound is below 1."""
    entry: float
    """Share of the entries of all maps' outputs that are off by more than ε."""
    any_entry: float
    """Share of the maps with such an entry."""
    averaging: float
    """Share of the entries by which plain averaging of V is off by more than ε."""


def bound(num_features: int, epsilon: float, head_dim: int, value_bound: float = VALUE_BOUND) -> float:
    """The paper's 2D exp(−Dε² / (2S²d²)).

    >>> round(bound(128, 0.1, 32), 1)
    255.8
    """
    return 2 * num_features * math.exp(-num_features * _rate(epsilon, head_dim, value_bound))


def informative_from(epsilon: float, head_dim: int, value_bound: float = VALUE_BOUND) -> int:
    """The number of features from which on the bound is below 1.

    >>> informative_from(1.0, 16), bound(4682, 1.0, 16) > 1 > bound(4683, 1.0, 16)
    (4683, True)
    """
    # The bound rises up to D = 1 / rate and falls from there on.
    low = high = max(1, math.ceil(1 / _rate(epsilon, head_dim, value_bound)))
    while bound(high, epsilon, head_dim, value_bound) >= 1:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if bound(middle, epsilon, head_dim, value_bound) < 1:
            high = middle
        else:
            low = middle + 1
    return high


def measure_rows(
    inputs: Inputs, num_features: int, epsilons: Sequence[float], *, heads: int, draws: int, seed: int
) -> Iterator[TailRow]:
    """One row for each ε, on rows as attention has them."""
    features = MaclaurinFeatures(
        inputs.query.shape[-1],
        num_features,
        construction="paper",
        num_heads=heads,
        seed=0,
        dtype=torch.float64,
    )
    yield from _count("rows", inputs, features, epsilons, draws, seed)


def measure_pair(num_features: int, epsilons: Sequence[float], *, draws: int, seed: int) -> Iterator[TailRow]:
    """One row for each ε, on the pair. In one dimension only the degrees are random: one map a draw.

    Each further degree is half as likely to be drawn and, if it is, 2 · 0.9 times as heavy: an error that
    falls more slowly than any bound of Hoeffding's kind.
    """
    one = torch.ones(1, 1, dtype=torch.float64)
    opposed = torch.cat([one, -one])
    features = MaclaurinFeatures(
        1,
        num_features,
        "inv",
        construction="paper",
        num_heads=1,
        scale=PAIR_SCALE,
        seed=0,
        dtype=torch.float64,
    )
    inputs = Inputs(one, opposed, VALUE_BOUND * opposed)
    yield from _count("pair", inputs, features, epsilons, draws, seed)


def _count(
    name: str, inputs: Inputs, features: MaclaurinFeatures, epsilons: Sequence[float], draws: int, seed: int
) -> Iterator[TailRow]:
    attention = exact(inputs, features.kernel.name, features.scale).ratio
    averaging = (attention - inputs.value.mean(0)).abs()
    errors = [
        (estimate(drawn, inputs).ratio - attention).abs().flatten(1)
        for drawn in resampled(features, draws, seed)
    ]
    by_map = torch.cat(errors)
    head_dim, num_features = features.head_dim, features.num_features
    for epsilon in epsilons:
        exceeding = ~(by_map <= epsilon)  # NaN, of a denominator that is 0, is no small error
        yield TailRow(
            check="tail",
            inputs=name,
            kernel=features.kernel.name,
            head_dim=head_dim,
            num_features=num_features,
            epsilon=epsilon,
            maps=len(by_map),
            bound=bound(num_features, epsilon, head_dim),
            informative_from=informative_from(epsilon, head_dim),
            entry=exceeding.double().mean().item(),
            any_entry=exceeding.any(-1).double().mean().item(),
            averaging=(averaging > epsilon).double().mean().item(),
        )


def _rate(epsilon: float, head_dim: int, value_bound: float) -> float:
    return epsilon**2 / (2 * value_bound**2 * head_dim**2)
