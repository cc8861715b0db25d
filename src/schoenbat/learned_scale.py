"""A logit scale that is learned: what a parameter ρ, one for each head, stands for.

    ``4·exp(20ρ)``, or ``R·sigmoid(20ρ + logit 0.9)`` for a kernel of finite radius R

Both start at ρ = 0; a scale is always positive, and below the radius.
"""

import math
from typing import Any

import torch
from torch import Tensor

from schoenbat.kernels import DotProductKernel
from schoenbat.precision import at_least_float32

# By Adam ρ moves by about the learning rate a step; twenty times that is what a scale needs.
SPEED = 20.0
_FIRST = 4.0
_FIRST_SHARE_OF_RADIUS = 0.9
_FIRST_LOGIT = math.log(_FIRST_SHARE_OF_RADIUS / (1 - _FIRST_SHARE_OF_RADIUS))


def first_scale(kernel: DotProductKernel) -> float:
    """The scale at ρ = 0."""
    return _FIRST if kernel.radius == math.inf else _FIRST_SHARE_OF_RADIUS * kernel.radius


def scale_of(rho: Tensor, kernel: DotProductKernel) -> Tensor:
    """The scale that ρ stands for, in float32 at least."""
    exponent = SPEED * rho.to(at_least_float32(rho.dtype))
    if kernel.radius == math.inf:
        return _FIRST * exponent.exp()
    share = torch.sigmoid(exponent + _FIRST_LOGIT)
    # In float32 a sigmoid reaches 1. The gradient stays that of the sigmoid, else no scale could come back.
    return kernel.radius * (share + (share.clamp(max=1 - 1e-6) - share).detach())


def rho_of(scale: Tensor, kernel: DotProductKernel) -> Tensor:
    """The ρ that stands for a scale; ValueError unless it lies between 0 and the radius, both excluded.

    Example:
        >>> from schoenbat import kernel
        >>> rho_of(torch.tensor([4.0]), kernel("exp")).item()
        0.0
    """
    scale = _of_heads("a scale", scale)
    if not _lies_between_zero_and(kernel.radius, scale):
        raise ValueError(
            f"a scale must be above 0 and below the radius {kernel.radius:g} of the kernel "
            f"{kernel.name!r}, got {scale.tolist()}"
        )
    if kernel.radius == math.inf:
        return (scale / _FIRST).log() / SPEED
    return (torch.logit(scale / kernel.radius) - _FIRST_LOGIT) / SPEED


def weight_of(rho: Tensor) -> Tensor:
    """The weight ``exp(20ρ)``, in float32 at least: 1 at ρ = 0."""
    return (SPEED * rho.to(at_least_float32(rho.dtype))).exp()


def rho_of_weight(weight: Tensor) -> Tensor:
    """The ρ that stands for a weight; ValueError unless it is positive and finite."""
    weight = _of_heads("the weight of far keys", weight)
    if not _lies_between_zero_and(math.inf, weight):
        raise ValueError(f"the weight of far keys must be positive and finite, got {weight.tolist()}")
    return weight.log() / SPEED


def _of_heads(name: str, values: Any) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} is given for each head by a tensor (num_heads,), got {values!r}")
    return values.to(torch.float64)


def _lies_between_zero_and(limit: float, values: Tensor) -> bool:
    """Both excluded; what is on the meta device has no values."""
    return values.is_meta or bool(((values > 0) & (values < limit)).all())
