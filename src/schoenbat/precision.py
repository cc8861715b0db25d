"""What half precision must not reach: maps, running averages, what accumulates."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor, nn


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 where that is more precise."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """While inside, nothing is cast on its own on the device of `like`."""
    device = like.device.type
    # Where it is off anyhow, to turn it off would still take microseconds. A program that is exported now may
    # run where it is on.
    is_off = not torch.is_autocast_enabled(device) and not torch.compiler.is_exporting()
    return nullcontext() if is_off else torch.autocast(device, enabled=False)


class StaysPrecise(nn.Module):
    """A module that follows every move and cast, but no cast to less than 32 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(device=moved.device)
            return moved

        return super()._apply(move, recurse)
