"""The guarded denominator: signed features can make it small or negative, so it has a floor.

    floor = count · a₀ · exp(min(0, a₁ m / a₀)),    m = scale · ⟨q, k̄⟩, k̄ the mean key.

For m < 0 this is Jensen's bound for ``exp``; for m ≥ 0 it is what the constant alone gives.
All row scalars are columns, ``(B, H, G, n, 1)``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.blocks import sum_over_heads

# exp(-80) is still a normal float32: the floor never reaches zero.
LOWEST_EXPONENT = -80.0


class Denominator(NamedTuple):
    floored: Tensor
    unit_floor: Tensor  # the floor at a₀ = 1
    below: Tensor  # bool: the floor is active
    falling: Tensor  # bool: the floor depends on m


def guard(features: Tensor, mean_logit: Tensor, count: Tensor, coefficients: Tensor) -> Denominator:
    """The floored denominator, given what the features give, m and the count.

    `coefficients` is ``(M, 3)``: the constant's weight in the map, a₀, a₁ / a₀.
    """
    constant, zeroth, slope = coefficients.view(-1, 1, 1, 1, 3).unbind(-1)
    exponent = slope * mean_logit
    unit_floor = count * exponent.clamp(LOWEST_EXPONENT, 0.0).exp()
    floor = zeroth * unit_floor
    total = constant * count + features
    # Not torch.maximum: one comparison decides value and gradient, and a NaN total stays visible.
    below = total < floor
    floored = torch.where(below, floor, total)
    falling = below & (exponent < 0) & (exponent > LOWEST_EXPONENT)
    return Denominator(torch.where(count > 0, floored, 1.0), unit_floor, below, falling)


def guard_backward(
    grad: Tensor, guarded: Denominator, mean_logit: Tensor, count: Tensor, coefficients: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `features`, `mean_logit` and `coefficients`, given that of the floored denominator."""
    _, zeroth, slope = coefficients.view(-1, 1, 1, 1, 3).unbind(-1)
    grad = torch.where(count > 0, grad, 0.0)
    to_total = torch.where(guarded.below, 0.0, grad)
    to_zeroth = torch.where(guarded.below, grad * guarded.unit_floor, 0.0)
    to_exponent = torch.where(guarded.falling, to_zeroth * zeroth, 0.0)
    per_row = torch.cat([to_total * count, to_zeroth, to_exponent * mean_logit], dim=-1)
    to_coefficients = sum_over_heads(coefficients, per_row.sum((0, 2, 3)))
    return to_total, to_exponent * slope, to_coefficients
