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
    total: Tensor  # without the floor
    exponent: Tensor


def guard(features: Tensor, mean_logit: Tensor, count: Tensor, coefficients: Tensor) -> Denominator:
    """The floored denominator, given what the features give, m and the count; 1 where there are no keys.

    `coefficients` is ``(M, 3)``: the constant's weight in the map, a₀, a₁ / a₀.
    """
    constant, zeroth, slope = _columns(coefficients)
    exponent = slope * mean_logit
    floor = _falling_exp(exponent) * (zeroth * count)
    total = features + (constant * count + (count == 0))
    # An infinite one would give v̄, wherever the numerator still fits.
    total = torch.where(total.isinf(), torch.nan, total)
    # Not torch.maximum: one comparison decides value and gradient, and a NaN total stays visible.
    return Denominator(torch.where(total < floor, floor, total), total, exponent)


def guard_backward(
    grad: Tensor, guarded: Denominator, mean_logit: Tensor, count: Tensor, coefficients: Tensor, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `features`, `mean_logit` and `coefficients`, given that of the floored denominator.

    That of `coefficients` is zero where they are not trained.
    """
    _, zeroth, slope = _columns(coefficients)
    exponent = guarded.exponent
    unit_floor = _falling_exp(exponent) * count
    below = guarded.total < zeroth * unit_floor
    falling = (exponent < 0) & (exponent > LOWEST_EXPONENT)
    to_total = torch.where(below, 0.0, grad)
    to_zeroth = torch.where(below, grad * unit_floor, 0.0)
    to_exponent = torch.where(falling, to_zeroth * zeroth, 0.0)
    if not train:
        return to_total, to_exponent * slope, torch.zeros_like(coefficients)
    per_row = torch.cat([to_total * count, to_zeroth, to_exponent * mean_logit], dim=-1)
    to_coefficients = sum_over_heads(coefficients, per_row.sum((0, 2, 3)))
    return to_total, to_exponent * slope, to_coefficients


def _falling_exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(LOWEST_EXPONENT, 0.0).exp()


def _columns(coefficients: Tensor) -> tuple[Tensor, ...]:
    return coefficients.view(-1, 1, 1, 1, 3).unbind(-1)
