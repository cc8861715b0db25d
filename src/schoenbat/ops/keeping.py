"""What is made from tensors and kept for later calls: when it may be made, when it may be used."""

from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _len_torch_dispatch_stack

_Made = TypeVar("_Made")
_HELD_FOR_GRAPHS: list[object] = []


def is_transformed() -> bool:
    """Whether torch.func transforms are active, or derivatives are taken forwards."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_concrete(*tensors: Tensor) -> bool:
    """Whether tensors hold values now: none that a compiler traces, or a transform or a mode wraps."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    return not _len_torch_dispatch_stack() and all(map(_is_plain, tensors))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not torch._C._functorch.is_legacy_batchedtensor(tensor)


def without_transforms(tensor: Tensor) -> Tensor | None:
    """What a tensor holds where torch.func transforms are active, dimensions that they hide first.

    None where there are no transforms, or no values.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        hidden = torch._C._functorch.maybe_get_bdim(tensor)
        tensor = torch._C._functorch.get_unwrapped(tensor)
        tensor = tensor if hidden < 0 else tensor.movedim(hidden, 0)
    return tensor if _is_plain(tensor) and not tensor.is_meta else None


def may_reuse(*tensors: Tensor) -> bool:
    """Whether what was made from these tensors in an earlier call may be used in this one.

    Not by what is not concrete (fake tensors), and not where autograd records.
    """
    return is_concrete(*tensors) and not any(t.requires_grad or t.is_inference() for t in tensors)


def may_keep(*tensors: Tensor) -> bool:
    """Whether what is made from these tensors now may be used again: not what a CUDA graph fills later."""
    return may_reuse(*tensors) and not _is_capturing(tensors[0])


def reuse(made: _Made, *tensors: Tensor) -> _Made:
    """What was made from these tensors; a CUDA graph that reads it needs it as long as the process lives."""
    if _is_capturing(tensors[0]) and not any(made is held for held in _HELD_FOR_GRAPHS):
        _HELD_FOR_GRAPHS.append(made)
    return made


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
