"""Choosing rows of a sequence of which some do not take part."""

import torch
from torch import Tensor


def spread(offsets: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Draw distinct numbers below ``count``, one from each of s equal stretches of them.

    Args:
        offsets: ``(..., s)`` in [0, 1): where in its stretch each number lies.
        count: integers ``(..., 1)``. Where one is at most s, every number below it is drawn.

    Returns:
        The numbers ``(..., s)``, and bool ``(..., s)``, False where a stretch is empty.
    """
    num_stretches = offsets.shape[-1]
    index = torch.arange(num_stretches, device=offsets.device)
    start = index * count // num_stretches
    width = (index + 1) * count // num_stretches - start
    drawn = start + (offsets * width).long()
    # An empty stretch at the end starts at count itself.
    return torch.minimum(drawn, (count - 1).clamp(min=0)), (width > 0).expand(drawn.shape)


def taking_part_first(mask: Tensor) -> Tensor:
    """Positions with those where ``mask`` ``(B, n)`` is True first, both kinds in their order."""
    return (~mask).argsort(stable=True)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of ``x`` ``(B, H, n, d)`` at ``index`` ``(B or 1, H or 1, ...)``: ``(B, H, ..., d)``.

    It copies whole rows, where `torch.gather` would read an index for each number.
    """
    batch, heads, length = x.shape[:3]
    start = length * torch.arange(batch * heads, device=x.device)
    index = start.view(batch, heads, *(1,) * (index.dim() - 2)) + index
    return x.flatten(0, 2).index_select(0, index.flatten()).unflatten(0, index.shape)
