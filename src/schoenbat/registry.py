"""Attentions by name with options: ``"schoenbat:kernel=inv,construction=paper,causal=true"``."""

import inspect
from typing import Any

from torch import nn

from schoenbat.baselines import (
    RFA,
    BigBird,
    CosFormer,
    Informer,
    Mean,
    NoMixing,
    Nystromformer,
    Performer,
    Reformer,
    Skyformer,
    Softmax,
)
from schoenbat.modules import SchoenbAt

_ATTENTIONS: dict[str, type[nn.Module]] = {
    "softmax": Softmax,
    "reformer": Reformer,
    "nystromformer": Nystromformer,
    "skyformer": Skyformer,
    "informer": Informer,
    "bigbird": BigBird,
    "cosformer": CosFormer,
    "rfa": RFA,
    "performer": Performer,
    "schoenbat": SchoenbAt,
    "mean": Mean,
    "none": NoMixing,
}
# What the caller of build_attention gives, not the text.
_GIVEN = {"self", "head_dim", "num_heads", "max_length", "device", "dtype", "process_group"}
_WORDS = {"true": True, "false": False, "none": None}


def attention_names() -> tuple[str, ...]:
    """The names that ``build_attention`` knows.

    >>> "softmax" in attention_names()
    True
    """
    return tuple(_ATTENTIONS)


def attention_options(name: str) -> tuple[str, ...]:
    """The options that the attention ``name`` takes in `build_attention`.

    >>> attention_options("softmax")
    ('naive', 'qk_norm', 'dropout', 'causal')
    """
    if name not in _ATTENTIONS:
        raise ValueError(f"unknown attention {name!r}; known are {', '.join(_ATTENTIONS)}")
    parameters = inspect.signature(_ATTENTIONS[name]).parameters
    return (*(option for option in parameters if option not in _GIVEN), "causal")


def build_attention(text: str, head_dim: int, num_heads: int, max_length: int | None = None) -> nn.Module:
    """Build the attention that ``text`` names, a module with the call of ``SchoenbAt``.

    Args:
        text: ``"name"`` or ``"name:option=value,..."``. The options are the keyword arguments of the
            attention's class, and ``causal=true``, which makes every call causal.
        head_dim: the dimension of one head.
        num_heads: the number of query heads.
        max_length: the longest sequence, for attentions that must know it.

    >>> build_attention("softmax:causal=true", head_dim=32, num_heads=2)
    Softmax(head_dim=32, num_heads=2)
    """
    if not isinstance(text, str):
        raise TypeError(f"an attention is named by a str, got {text!r}; known are {', '.join(_ATTENTIONS)}")
    name, _, option_text = text.partition(":")
    options = _parse_options(name, option_text, attention_options(name))
    attention = _ATTENTIONS[name]
    causal = options.pop("causal", False)
    if not isinstance(causal, bool):
        raise ValueError(f"option causal of attention {name!r} is true or false, got {causal!r}")
    if "max_length" in inspect.signature(attention).parameters:
        options["max_length"] = max_length
    try:
        module = attention(head_dim, num_heads, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"attention {text!r}: {error}") from error
    if causal:
        module.register_forward_pre_hook(_make_causal, with_kwargs=True)
    return module


def _parse_options(name: str, text: str, known: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"option {part!r} of attention {name!r} has no value; write {option}=value")
        if option not in known:
            raise ValueError(f"unknown option {option!r} of attention {name!r}; known are {', '.join(known)}")
        options[option] = _parse_value(value)
    return options


def _parse_value(text: str) -> bool | int | float | str | None:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _make_causal(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {"is_causal": True}
