"""Sums over the ranks of a process group, with their gradients: those of the sum of all ranks' losses."""

import copy
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:  # not there where torch is built without torch.distributed
    from torch.distributed import ProcessGroup


def check_group(group: "ProcessGroup") -> None:
    """Raise a TypeError for what is not a group that this process belongs to."""
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup that this process belongs to, got {group!r}; "
            "call torch.distributed.init_process_group first and pass torch.distributed.group.WORLD, or on "
            "its own ranks a group from new_group"
        )


class WithProcessGroup(nn.Module):
    """A module whose ``process_group`` a copy shares and a file leaves out: it means nothing elsewhere."""

    process_group: "ProcessGroup | None" = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "process_group"}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new.process_group = self.process_group
        return new


def sum_over_ranks(x: Tensor, group: "ProcessGroup") -> Tensor:
    """``Σ_p x_p``, on every rank."""
    return _Sum.apply(x, group)


def sum_of_earlier_ranks(x: Tensor, group: "ProcessGroup") -> Tensor:
    """``Σ_{p < r} x_p`` on rank r, added up in the order of the ranks."""
    return _ExclusivePrefix.apply(x, group)


def gather(x: Tensor, group: "ProcessGroup") -> Tensor:
    """The tensors of all ranks, ``(ranks, ...)``, without a gradient."""
    every = x.new_empty(group.size(), *x.shape)
    dist.all_gather(list(every.unbind()), x.contiguous(), group=group)
    return every


class _Sum(Function):
    """``y_r = Σ_p x_p`` on every rank r; every rank reads every x, so ``x̄_r = Σ_p ȳ_p``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "ProcessGroup") -> Tensor:
        ctx.group = group
        return _reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce(grad, ctx.group), None


class _ExclusivePrefix(Function):
    """``y_r = Σ_{p < r} x_p``; the ranks after r read its x, so ``x̄_r = Σ_{p > r} ȳ_p``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "ProcessGroup") -> Tensor:
        ctx.group = group
        return gather(x, group)[: group.rank()].sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather(grad, ctx.group)[ctx.group.rank() + 1 :].sum(0), None


def _reduce(x: Tensor, group: "ProcessGroup") -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
