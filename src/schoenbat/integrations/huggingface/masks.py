"""The mask in the form that linear attention takes: which keys take part, and whether attention is causal.

A compact mask is one of

- None: every key takes part; the attention module itself says whether it is causal.
- bool ``(B, n)``: causal; the last columns belong to the keys of the call, however many a cache returns.
- bool ``(B, 1, 1, n_k)``: bidirectional.

A pattern that is neither (a sliding window, packed sequences, a custom overlay) stays dense, for layers that
kept their softmax.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **more: Any,
) -> Tensor | None:
    """What `AttentionMaskInterface` calls, once a forward, in place of building a dense mask."""
    # Of a static cache, the first call gives its offset as a number, but more keys than have come.
    if isinstance(q_offset, Tensor) or (allow_is_causal_skip and kv_offset + kv_length > q_offset + q_length):
        raise ValueError(
            "a static cache holds positions that are not filled yet, which linear attention would add up; "
            "leave cache_implementation at None: the state of a SchoenbAt layer has a fixed size already"
        )
    # Inside its window, a local pattern is what it is without one; as many keys may lie in two chunks.
    everything = local_size is None or kv_length < local_size
    plain = local_size is not None or mask_function in (causal_mask_function, bidirectional_mask_function)
    if not (plain and everything and (allow_is_causal_skip or allow_is_bidirectional_skip)):
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **more,
        )
    if attention_mask is None or _keeps_everything(attention_mask):
        return None
    return attention_mask if allow_is_causal_skip else attention_mask[:, None, None, :kv_length]


def read_mask(mask: Tensor | None, is_causal: bool, keys: int) -> tuple[Tensor | None, bool]:
    """A compact mask as ``key_mask`` bool ``(B, keys)``, True = takes part; and whether it is causal."""
    if mask is None:
        return None, is_causal
    if mask.dim() == 2:
        return mask[:, mask.shape[1] - keys :], True
    if mask.dim() == 4 and mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return mask[:, 0, 0], False
    raise ValueError(
        f"linear attention cannot follow a mask of shape {tuple(mask.shape)} and type {mask.dtype}: it forms "
        "no scores that could be masked one by one. Causal and padding masks (batch, length) can be "
        "followed; sliding windows, packed sequences and custom 4-d masks cannot. A compiled model without a "
        "cache takes its input for packed sequences unless it gets an attention_mask, which may be all ones"
    )


def dense_mask(
    mask: Tensor | None, is_causal: bool, queries: int, keys: int, device: torch.device
) -> Tensor | None:
    """A compact mask as SDPA takes it, for a layer that kept its softmax."""
    if mask is not None and mask.dim() == 4:
        return mask
    if mask is None and (not is_causal or queries in (1, keys)):
        return None
    causal = _causal(queries, keys, device)
    return causal if mask is None else causal & mask[:, None, None, mask.shape[1] - keys :]


def additive_mask(dense: Tensor | None, is_causal: bool, query: Tensor, keys: int) -> Tensor | None:
    """What `dense_mask` gave as transformers' eager attentions take it: added, and causal by itself."""
    if dense is None and is_causal:
        dense = _causal(query.shape[-2], keys, query.device)
    if dense is None or dense.dtype != torch.bool:
        return dense
    lowest = torch.finfo(query.dtype).min
    return torch.zeros_like(dense, dtype=query.dtype).masked_fill(~dense, lowest)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    last_key = torch.arange(queries, device=device)[:, None] + keys - queries
    return (torch.arange(keys, device=device) <= last_key)[None, None]


def says_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """As transformers' own attentions decide where there is no mask: the call, else the module, else yes."""
    return bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal


def _keeps_everything(mask: Tensor) -> bool:
    """Whether there is no padding; a compiled graph does not look."""
    return not torch.compiler.is_compiling() and bool(mask.all())
