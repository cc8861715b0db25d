"""How D features are spent on the degrees of a series, and how their directions are drawn.

Each construction is a function ``(coefficients, head_dim, num_features, scale, generator) -> Plan``;
drawing is the same for all. Everything here runs on the CPU in float64 from one seeded generator, so that a
seed means the same map everywhere.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

# Where series are cut off: no weight that counts is left here, unless a plan comes within 5 % of a radius.
MAX_DEGREE = 300
# The largest power of a scale: the products of rows grow with it, and weights fall with it, both in float32.
_LARGEST_POWER = 1e32
# The share of a kernel that may be left out with the degrees of larger powers.
_MOST_LEFT_OUT = 0.1


@dataclass(frozen=True)
class Plan:
    """One entry for each feature, in ascending degree: its degree and its squared weight."""

    degrees: tuple[int, ...]
    weights: tuple[float, ...]
    exact_linear: bool = False  # the linear part is x itself, no directions needed
    directions: int = 0  # r of the quadratic block; without it, degree 2 belongs to the tail
    rademacher: bool = False  # i.i.d. signs in place of orthogonal directions


class _Spending:
    """Collects (degree, squared weight) pairs; what is left over splits the constant, which is free."""

    def __init__(self, zeroth: float, num_features: int) -> None:
        self._zeroth, self._num_features = zeroth, num_features
        self._entries: list[tuple[int, float]] = []

    @property
    def left(self) -> int:
        return self._num_features - 1 - len(self._entries)

    def add(self, degree: int, count: int, weight: float) -> None:
        self._entries += [(degree, weight)] * count

    def finish(self, *, exact_linear: bool = False, directions: int = 0) -> Plan:
        constants = self.left + 1
        entries = [(0, self._zeroth / constants)] * constants + sorted(self._entries, key=lambda e: e[0])
        degrees, weights = zip(*entries, strict=True)
        return Plan(degrees, weights, exact_linear, directions)


def exact_low(
    coefficients: Tensor, head_dim: int, num_features: int, scale: float, generator: Generator
) -> Plan:
    """Constant, linear part and pair monomials on r directions, all exact; biased on purpose.

    What is left beyond the complete degree 2 goes to an unbiased tail.
    """
    zeroth, first, second = coefficients[:3].tolist()
    spending = _Spending(zeroth, num_features)
    exact_linear = False
    if first > 0:
        exact_linear = spending.left >= head_dim
        # Directions have norm √d, hence 1/d: the part of the linear term that lies on them, not rescaled.
        weight = first if exact_linear else first / head_dim
        spending.add(1, min(spending.left, head_dim), weight)
    directions = 0
    if second > 0 and spending.left:
        pairs = min(spending.left, head_dim * (head_dim + 1) // 2)
        left, right = torch.tril_indices(head_dim, head_dim)[:, :pairs]
        directions = int(left[-1]) + 1
        for is_square in (left == right).tolist():
            spending.add(2, 1, second if is_square else 2 * second)
    if spending.left:
        used = min(3, len(coefficients))
        higher = torch.cat([torch.zeros(used, dtype=torch.float64), coefficients[used:]])
        _spend_unbiased(spending, higher, head_dim, scale, generator)
    return spending.finish(exact_linear=exact_linear, directions=directions)


def unbiased(
    coefficients: Tensor, head_dim: int, num_features: int, scale: float, generator: Generator
) -> Plan:
    """Exact constant; D_n ∝ a_n sⁿ features of degree n ≥ 1, one of a degree sampled from those left out."""
    spending = _Spending(float(coefficients[0]), num_features)
    higher = torch.cat([torch.zeros(1, dtype=torch.float64), coefficients[1:]])
    counts = _spend_unbiased(spending, higher, head_dim, scale, generator)
    return spending.finish(exact_linear=counts.get(1) == head_dim)


def paper(coefficients: Tensor, head_dim: int, num_features: int, scale: float, generator: Generator) -> Plan:
    """The paper's map: every degree i.i.d. with P[N = n] ∝ 2^-(n+1) over the degrees that exist."""
    return _iid(coefficients, num_features, 0, generator)


def paper_code(
    coefficients: Tensor, head_dim: int, num_features: int, scale: float, generator: Generator
) -> Plan:
    """The map of the authors' program: the constant exact, the degrees of the others i.i.d. from n ≥ 1."""
    return _iid(coefficients, num_features, 1, generator)


Construction = Callable[[Tensor, int, int, float, Generator], Plan]
CONSTRUCTIONS: Mapping[str, Construction] = {
    "exact-low": exact_low,
    "unbiased": unbiased,
    "paper": paper,
    "paper-code": paper_code,
}


def _iid(coefficients: Tensor, num_features: int, lowest: int, generator: Generator) -> Plan:
    exists = coefficients[: MAX_DEGREE // 5] > 0
    exists[:lowest] = False
    probabilities = exists * 0.5 ** torch.arange(1.0, len(exists) + 1, dtype=torch.float64)
    probabilities /= probabilities.sum()
    count = num_features - lowest
    degrees = torch.multinomial(probabilities, count, replacement=True, generator=generator).sort().values
    weights = coefficients[degrees] / (probabilities[degrees] * count)
    constant = ((0, float(coefficients[0])),) * lowest
    entries = (*constant, *zip(degrees.tolist(), weights.tolist(), strict=True))
    all_degrees, all_weights = zip(*entries, strict=True)
    return Plan(all_degrees, all_weights, rademacher=True)


def _spend_unbiased(
    spending: _Spending, coefficients: Tensor, head_dim: int, scale: float, generator: Generator
) -> dict[int, int]:
    """Spend all that is left on the degrees of `coefficients`; returns the number of features by degree."""
    shares = _shares(coefficients, scale)
    counts = _allocate(shares, spending.left, head_dim)
    sampled: dict[int, float] = {n: share for n, share in shares.items() if n not in counts}
    if any(sampled.values()):
        counts = _allocate(shares, spending.left - 1, head_dim)
        sampled = {n: share for n, share in shares.items() if n not in counts}
    for degree, count in counts.items():
        # The complete linear part is x itself: unit directions, not as many of norm √d.
        complete = degree == 1 and count == head_dim
        spending.add(degree, count, float(coefficients[degree]) / (1 if complete else count))
    if any(sampled.values()):
        chances = torch.tensor(list(sampled.values()), dtype=torch.float64)
        pick = int(torch.multinomial(chances, 1, generator=generator))
        degree = list(sampled)[pick]
        spending.add(degree, 1, float(coefficients[degree] * chances.sum() / chances[pick]))
    return counts


def _shares(coefficients: Tensor, scale: float) -> dict[int, float]:
    """``a_n sⁿ`` for the degrees that exist; 0 where a map cannot hold sⁿ."""
    degrees = torch.arange(len(coefficients), dtype=torch.float64)
    powers = scale**degrees
    # a_n sⁿ may be small where sⁿ is beyond float64.
    by_logarithms = (coefficients.log() + degrees * math.log(scale)).exp()
    products = torch.where(powers.isinf(), by_logarithms, coefficients * powers)
    held = torch.where(powers <= _LARGEST_POWER, products, 0.0)
    if not held.sum() >= (1 - _MOST_LEFT_OUT) * products.sum():
        raise ValueError(
            f"the powers of scale {scale:g}, up to degree {len(powers) - 1}, do not fit into float32; choose "
            "a smaller scale, or write the kernel for a multiple of x"
        )
    return {n: share for n, share in enumerate(held.tolist()) if products[n] > 0}


def _allocate(shares: Mapping[int, float], count: int, head_dim: int) -> dict[int, int]:
    """Largest remainder; degree 1 takes at most d, which is exact, and the others share the excess."""
    total = sum(shares.values())
    if not total or count <= 0:
        return {}
    if 1 in shares and count * shares[1] > head_dim * total:
        others = {n: share for n, share in shares.items() if n != 1}
        return {1: head_dim, **_allocate(others, count - head_dim, head_dim)}
    quotas = {n: count * share / total for n, share in shares.items()}
    counts = {n: int(quota) for n, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda n: (counts[n] - quotas[n], n))
    for degree in by_remainder[: count - sum(counts.values())]:
        counts[degree] += 1
    return {n: number for n, number in counts.items() if number}


def draw(plan: Plan, head_dim: int, maps: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The directions of a plan: linear ``(maps, d, D₁)``, quadratic ``(maps, d, r)``, tail ``(maps, d, Σn)``.

    Linear and tail directions have norm √d, so that E⟨ω, x⟩⟨ω, y⟩ = ⟨x, y⟩; the quadratic ones have norm 1.
    """
    in_tail = [n for n in plan.degrees if n > (2 if plan.directions else 1)]
    num_linear = 0 if plan.exact_linear else plan.degrees.count(1)
    linear = _directions(plan, head_dim, maps, num_linear, generator)
    quadratic = _frame(head_dim, maps, plan.directions, generator)
    # Directions of one degree and level are orthogonal to each other; level by level, as `Blocks.tail` has
    # them.
    levels: list[Tensor] = []
    for level in range(max(in_tail, default=0)):
        for degree in sorted(set(in_tail)):
            if degree > level:
                levels.append(_directions(plan, head_dim, maps, in_tail.count(degree), generator))
    empty = torch.empty(maps, head_dim, 0, dtype=torch.float64)
    return linear, quadratic, torch.cat([empty, *levels], dim=-1)


def _directions(plan: Plan, head_dim: int, maps: int, count: int, generator: Generator) -> Tensor:
    if plan.rademacher:
        signs = torch.randint(0, 2, (maps, head_dim, count), generator=generator)
        return signs.to(torch.float64) * 2 - 1
    frames = [
        _frame(head_dim, maps, min(head_dim, count - start), generator) for start in range(0, count, head_dim)
    ]
    empty = torch.empty(maps, head_dim, 0, dtype=torch.float64)
    return torch.cat([empty, *frames], dim=-1) * head_dim**0.5


def _frame(head_dim: int, maps: int, count: int, generator: Generator) -> Tensor:
    """`count` ≤ d orthonormal columns, uniformly distributed (QR of a normal matrix, signs made unique)."""
    normal = torch.randn(maps, head_dim, count, dtype=torch.float64, generator=generator)
    if not count:
        return normal
    q, r = torch.linalg.qr(normal)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
