"""The attention function that transformers calls, and a record of its calls."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from schoenbat.integrations.huggingface.cache import RMFALayer, leave_cache
from schoenbat.integrations.huggingface.masks import additive_mask, dense_mask, read_mask, says_causal
from schoenbat.integrations.huggingface.name import NAME
from schoenbat.modules import SchoenbAt
from schoenbat.state import RMFAState

BEYOND_A_KERNEL = {
    "position_bias": "adds a position bias to its scores",
    "softcap": "caps its scores",
    "s_aux": "has attention sinks",
    "indices": "picks keys by index",
    "block_indices": "picks blocks of keys by index",
    "cu_seq_lens_q": "attends within packed sequences",
}
"""Arguments of an attention call that have no counterpart where no scores are formed, and what they mean."""

BEYOND_SDPA = ("softcap", "s_aux")
"""Those of them that SDPA leaves out or refuses."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention layer: in ``(B, H, n, d)``, out ``(B, n, H, d_v)``."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    is_causal: bool
    output: Tensor


_record: ContextVar[list[AttentionCall] | None] = ContextVar("attention_calls", default=None)


@contextmanager
def record_attention() -> Iterator[list[AttentionCall]]:
    """Collect every call of an attention that goes through ``attn_implementation="schoenbat"``.

    Layers that kept their softmax are recorded as well, except where their mask is dense; what is compiled is
    not.
    """
    calls: list[AttentionCall] = []
    before = _record.set(calls)
    try:
        yield calls
    finally:
        _record.reset(before)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What `AttentionInterface` calls: the SchoenbAt that the module carries, or softmax where it has none.

    Dropout acts on the output: weights are never formed.
    """
    causal = says_causal(module, is_causal)
    query, scaling = _at_own_scale(module, query, scaling)
    attention = getattr(module, NAME, None)
    if attention is None:
        out = _softmax(
            module, query, key, value, attention_mask, causal, scaling=scaling, dropout=dropout, **more
        )
    else:
        _refuse(module, more)
        key_mask, causal = read_mask(attention_mask, causal, key.shape[-2])
        out = _linear(attention, query, key, value, key_mask, causal, leave_cache(module))
        out = nn.functional.dropout(out, dropout, training=dropout > 0).transpose(1, 2).contiguous()
    calls = None if torch.compiler.is_compiling() else _record.get()
    if calls is not None and (
        attention_mask is None or attention_mask.dim() == 2 or attention_mask.shape[2] == 1
    ):
        key_mask, causal = read_mask(attention_mask, causal, key.shape[-2])
        calls.append(AttentionCall(module, query, key, value, key_mask, causal, out))
    return out, None


def own_scaling(module: nn.Module, head_dim: int) -> float:
    """The scale of a module's scores that its SchoenbAt is built for: its own, or ``1 / sqrt(d)``."""
    scaling = getattr(module, "scaling", None)
    return float(scaling) if isinstance(scaling, int | float) else head_dim**-0.5


def _at_own_scale(module: nn.Module, query: Tensor, scaling: float | None) -> tuple[Tensor, float]:
    """Some modules name one scale and call with another, having multiplied their queries themselves."""
    own = own_scaling(module, query.shape[-1])
    called = query.shape[-1] ** -0.5 if scaling is None else scaling
    return (query if called == own else query * (called / own)), own


def _linear(
    attention: SchoenbAt,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    layer: RMFALayer | None,
) -> Tensor:
    if layer is None:
        if attention.window is not None and is_causal and query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"{query.shape[-2]} queries and {key.shape[-2]} keys came to an attention with a window: "
                "a cache that was filled with gradients on, or by another attention, keeps keys instead of a "
                "state; begin a new one under torch.no_grad()"
            )
        grouped = query.shape[1] != key.shape[1]
        return attention(query, key, value, key_mask=key_mask, is_causal=is_causal, enable_gqa=grouped)
    if is_causal:
        if key.shape[-2] != layer.arrived:
            raise ValueError(
                f"{layer.arrived} keys went into the cache and {key.shape[-2]} came to the attention: this "
                "model does more with its cache than a state can follow; generate with use_cache=False"
            )
        out, layer.state = attention.step(query, key, value, layer.state, key_mask=key_mask)
        return out
    return _cross(attention, query, key, value, key_mask, layer)


def _cross(
    attention: SchoenbAt, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, layer: RMFALayer
) -> Tensor:
    """Cross attention while decoding: the encoder's keys are summed up once, then only read."""
    if not isinstance(layer.state, RMFAState):
        layer.state = _sum_up(attention, key, value, key_mask)
    elif key.shape[-2]:
        raise ValueError(
            f"{key.shape[-2]} new keys came with a dense mask, which does not tell that a layer is causal; "
            "pass attention_mask as (batch, length)"
        )
    # From the second call on there are no keys, while the mask still speaks of all of them.
    if attention.query_norm is not None:
        query = attention.query_norm(query)
    out = layer.state.read(_times(query, attention.query_map), attention.features, attention.scale)
    return out if attention.post is None else attention.post(out)


def _sum_up(attention: SchoenbAt, key: Tensor, value: Tensor, key_mask: Tensor | None) -> RMFAState:
    if attention.key_norm is not None:
        key = attention.key_norm(key, key_mask)
    key = _times(attention._center(key, key_mask, is_causal=False), attention.key_map)
    batch, heads = key.shape[:2]
    state = RMFAState.zeros(
        attention.features, batch, heads, value.shape[-1], device=key.device, dtype=key.dtype
    )
    return state.update(key, value, attention.features, key_mask)


def _times(rows: Tensor, matrix: Tensor | None) -> Tensor:
    return rows if matrix is None else rows @ matrix.to(rows.dtype)


def _softmax(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    **more: Any,
) -> Tensor:
    dense = dense_mask(mask, is_causal, query.shape[-2], key.shape[-2], query.device)
    if any(more.get(name) is not None for name in BEYOND_SDPA):
        return _softmax_of_its_own(module, query, key, value, dense, is_causal, **more)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, dense, is_causal=is_causal, **more)[0]


def _softmax_of_its_own(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dense: Tensor | None,
    is_causal: bool,
    **more: Any,
) -> Tensor:
    """By the function that stands beside the module's class, or one it is made from; its mask is added."""
    beside = [sys.modules[kind.__module__] for kind in type(module).__mro__]
    found = [file.eager_attention_forward for file in beside if hasattr(file, "eager_attention_forward")]
    if not found:
        raise ValueError(
            f"{type(module).__name__} keeps its softmax, and no eager_attention_forward stands beside it for "
            'what SDPA cannot do; load this model with attn_implementation="eager"'
        )
    added = additive_mask(dense, is_causal, query, key.shape[-2])
    return found[0](module, query, key, value, added, **more)[0]


def _refuse(module: nn.Module, more: dict[str, Any]) -> None:
    for name, meaning in BEYOND_A_KERNEL.items():
        if more.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} {meaning} ({name}): linear attention forms no scores and cannot; "
                'load this model with attn_implementation="sdpa" or "eager"'
            )
