"""Where a cast to half precision must not reach: maps, running averages, what accumulates."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """While inside, nothing is cast on its own on the device of `like`."""
    device = like.device.type
    # Where it is off anyhow, to turn it off would still take microseconds. A program that is exported now may
    # run where it is on.
    is_off = not torch.is_autocast_enabled(device) and not torch.compiler.is_exporting()
    return nullcontext() if is_off else torch.autocast(device, enabled=False)


def refuse_half(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn`, which `nn.Module._apply` applies to every tensor, without its casts to less than 32 bits."""

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.is_floating_point() and moved.dtype.itemsize < 4:
            return tensor.to(device=moved.device)
        return moved

    return move
