"""Which modules of a model are attention, which of them SchoenbAt can stand in for, and with what shape."""

import functools
import inspect
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from schoenbat.integrations.huggingface.attention import BEYOND_A_KERNEL, own_scaling
from schoenbat.integrations.huggingface.cache import enter_cache
from schoenbat.integrations.huggingface.name import NAME
from schoenbat.kernels import kernel as get_kernel
from schoenbat.modules import SchoenbAt

# What transformers' attention modules call the same two things.
_HEAD_DIM = ("qk_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_LEAST_FEATURES = 128


class Found(NamedTuple):
    """An attention module of a model."""

    name: str
    module: nn.Module
    obstacle: str | None
    """Why SchoenbAt cannot stand in for it; None if it can."""


def find(model: nn.Module) -> Iterator[Found]:
    """Every attention module, in the order of the model."""
    for name, module in model.named_modules():
        if calls_interface(type(module)):
            yield Found(name, module, _obstacle(module))
        elif _is_named_attention(module) and not any(map(_is_named_attention, list(module.modules())[1:])):
            yield Found(name, module, "does not go through transformers' AttentionInterface")


def _is_named_attention(module: nn.Module) -> bool:
    """By its class's name; what only wraps another attention is not looked for."""
    return "Attention" in type(module).__name__


def calls_interface(kind: type) -> bool:
    """Whether modules of this class look their attention function up, as `attn_implementation` needs."""
    return "ALL_ATTENTION_FUNCTIONS" in _source(kind)


@functools.cache
def _source(kind: Hashable) -> str:
    try:
        return inspect.getsource(inspect.unwrap(kind.forward))  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):
        return ""


def _obstacle(module: nn.Module) -> str | None:
    for argument, meaning in BEYOND_A_KERNEL.items():
        # Packed sequences are passed to flash attention alone; others are called piece by piece.
        if argument != "cu_seq_lens_q" and re.search(
            rf"\b{argument}=", _source(cast(Hashable, type(module)))
        ):
            return meaning
    if getattr(getattr(module, "config", None), "num_kv_shared_layers", 0):
        return "shares keys with other layers"
    if _type_of_layer(module) == "chunked_attention":
        return "attends within chunks, in linear time already"
    if (window := _sliding_window(module)) is not None:
        return f"attends within a sliding window of {window} tokens, in linear time already"
    if _first_number(module, _HEAD_DIM) is None or _num_heads(module) is None:
        return "does not tell its number of heads and their dimension"
    return None


def _type_of_layer(module: nn.Module) -> str | None:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    return None if types is None else types[getattr(module, "layer_idx", 0) or 0]


def _sliding_window(module: nn.Module) -> int | None:
    config = getattr(module, "config", None)
    if hasattr(module, "sliding_window"):
        return module.sliding_window if isinstance(module.sliding_window, int) else None
    if (kind := _type_of_layer(module)) is not None:
        return getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    return getattr(config, "sliding_window", None)


def _num_heads(module: nn.Module) -> int | None:
    own = _first_number(module, _NUM_HEADS)
    number = _first_number(getattr(module, "config", None), _NUM_HEADS) if own is None else own
    return None if number is None else int(number)


def _first_number(owner: object, names: tuple[str, ...]) -> float | int | None:
    numbers = (getattr(owner, name, None) for name in names)
    return next((number for number in numbers if isinstance(number, int | float)), None)


class CenteredWhereItCan(SchoenbAt):
    """SchoenbAt on keys without their mean, and on keys as they are where a call turns out to be causal.

    Some modules (CLIP's) do not know beforehand.
    """

    def _center(self, key: Tensor, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        return key if is_causal else super()._center(key, key_mask, is_causal)


def build(module: nn.Module, options: Mapping[str, Any], device: torch.device | None) -> SchoenbAt:
    """The SchoenbAt that stands in for an attention module.

    ``scale=None`` is the module's own scale; a learned one begins there where rows keep their lengths.
    ``center_keys="auto"`` is what costs nothing in exactness: the mean of the keys where attention is
    bidirectional, a learned centre where it is causal. ``num_features="auto"`` leaves room for pairs beside
    the linear part. A window means nothing in cross attention.
    """
    head_dim, num_heads = _first_number(module, _HEAD_DIM), _num_heads(module)
    if head_dim is None or num_heads is None:
        raise ValueError(f"{type(module).__name__} {_obstacle(module)}")
    chosen, scaling, kind = dict(options), own_scaling(module, int(head_dim)), SchoenbAt
    if chosen["scale"] is None:
        chosen["scale"] = scaling
    if chosen["num_features"] == "auto":
        chosen["num_features"] = max(_LEAST_FEATURES, 2 * int(head_dim))
    if chosen["center_keys"] == "auto":
        cancels = get_kernel(chosen["kernel"]).is_exponential and chosen["normalization"] is None
        chosen["center_keys"] = cancels and ("learned" if is_causal(module) else True)
        kind = CenteredWhereItCan if chosen["center_keys"] is True else SchoenbAt
    if is_cross(module):
        chosen.pop("window", None)
    attention = kind(
        int(head_dim),
        num_heads,
        value_dim=getattr(module, "v_head_dim", None),
        num_key_heads=num_heads // getattr(module, "num_key_value_groups", 1),
        device=device,
        **chosen,
    )
    if attention.rho is not None and attention.query_norm is None:
        attention.set_scale(torch.full((num_heads,), scaling, device=device))
    return attention


def is_causal(module: nn.Module) -> bool:
    """As transformers' own attentions take it: yes, unless the module says no."""
    return bool(getattr(module, "is_causal", True))


def is_cross(module: nn.Module) -> bool:
    """Whether keys come from another sequence; modules tell in one of three ways."""
    named = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    return bool(named or (getattr(module, "is_decoder", False) and not is_causal(module)))


def attach(module: nn.Module, attention: SchoenbAt) -> None:
    """Make SchoenbAt a submodule of an attention module: saved with it, moved with it, trained with it."""
    if not hasattr(module, NAME):
        module.register_forward_pre_hook(enter_cache, with_kwargs=True)
    setattr(module, NAME, attention.train(module.training))
