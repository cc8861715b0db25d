"""What a module-wide cast to half precision must not reach: maps and running averages."""

from collections.abc import Callable

from torch import Tensor


def refuse_half(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn`, which `nn.Module._apply` applies to every tensor, without its casts to less than 32 bits."""

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.is_floating_point() and moved.dtype.itemsize < 4:
            return tensor.to(device=moved.device)
        return moved

    return move
