"""Keeping masked rows out of sums."""

import torch
from torch import Tensor

from schoenbat.precision import at_least_float32


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Zero ``x`` ``(B, H, n, d)`` where ``mask`` ``(B, n)`` is False.

    Filled, not multiplied: a masked row may be NaN, and NaN times zero is NaN.
    """
    return x.masked_fill(~mask[:, None, :, None], 0.0)


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """The rows of x, float32 at least and zero where the mask is False.

    Args:
        x: ``(B, H, n, d)``.
        mask: bool ``(B, n)``, True where a row takes part; None for all rows.

    Example:
        >>> x = torch.tensor([1.0, torch.nan]).view(1, 1, 2, 1)
        >>> hide(x, torch.tensor([[True, False]])).flatten().tolist()
        [1.0, 0.0]
    """
    x = x.to(at_least_float32(x.dtype))
    return x if mask is None else zero_masked(x, mask)


def present(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mask of the rows of x ``(B, H, n, d)``, written out where it is None: bool ``(B, n)``.

    Example:
        >>> present(torch.zeros(1, 4, 2, 8), None).tolist()
        [[True, True]]
    """
    if mask is not None:
        return mask
    return torch.ones(x.shape[0], x.shape[-2], dtype=torch.bool, device=x.device)
