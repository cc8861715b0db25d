"""FlexAttention, compiled once: uncompiled it forms all scores."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def compiled_flex() -> Callable[..., Tensor]:
    """``torch.nn.attention.flex_attention.flex_attention`` through ``torch.compile``.

    As it is where a compiler traces: it is compiled with what is around it.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention
    return _compiled()


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def has_fast_path(query: Tensor, value: Tensor) -> bool:
    """Whether FlexAttention has kernels, with a backward pass, for such tensors."""
    widths = query.shape[-1], value.shape[-1]
    usual = all(16 <= width <= 256 and width & (width - 1) == 0 for width in widths)
    return usual and query.is_cuda and query.dtype != torch.float64
