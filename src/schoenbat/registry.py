"""Attentions by name with options: ``"schoenbat:kernel=inv,construction=paper,causal=true"``."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from schoenbat.adapters import BothWays, Convolved, HeadNorm, Rotary
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
from schoenbat.kernels import DotProductKernel
from schoenbat.kernels import kernel as get_kernel
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
# Options of every attention with what they may be, the default first; `Convolved` checks its width itself.
_OF_ALL: dict[str, tuple[Any, ...]] = {
    "causal": (False, True, "both"),
    "rotary": (False, True),
    "conv": (None,),
    "head_norm": (False, True),
}


def attention_names() -> tuple[str, ...]:
    """The names that ``build_attention`` knows.

    >>> "softmax" in attention_names()
    True
    """
    return tuple(_ATTENTIONS)


def attention_options(name: str) -> tuple[str, ...]:
    """The options that the attention ``name`` takes in `build_attention`.

    >>> attention_options("softmax")
    ('naive', 'qk_norm', 'scale', 'window', 'dropout', 'causal', 'rotary', 'conv', 'head_norm')
    """
    if name not in _ATTENTIONS:
        raise ValueError(f"unknown attention {name!r}; known are {', '.join(_ATTENTIONS)}")
    parameters = inspect.signature(_ATTENTIONS[name]).parameters
    return (*(option for option in parameters if option not in _GIVEN), *_OF_ALL)


def parse_attention(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of an attention's text.

    >>> parse_attention("softmax: qk_norm = true,scale=2.0")
    ('softmax', {'qk_norm': True, 'scale': 2.0})
    """
    name, _, options = text.partition(":")
    return name, _parse_options(name, options, attention_options(name))


def parse_attentions(texts: Iterable[str]) -> tuple[str, ...]:
    """Attentions of a command line: ``"all"``, or names with or without options, separated by commas.

    A comma before ``option=`` belongs to the attention before it.

    >>> parse_attentions(["softmax,performer", "schoenbat:kernel=inv,post=false,rfa"])
    ('softmax', 'performer', 'schoenbat:kernel=inv,post=false', 'rfa')
    """
    parts = (part.strip() for text in texts for part in re.split(r",(?!\s*\w+\s*=)", text))
    chosen = (attention_names() if part == "all" else (part,) for part in parts)
    return tuple(dict.fromkeys(name for names in chosen for name in names))


def with_seed(text: str, seed: int | None = None) -> str:
    """The text of an attention with this seed, if it draws something and does not say from which itself.

    None stands for a seed from torch's global generator: two layers then draw differently.

    >>> [with_seed(text, 3) for text in ("performer", "rfa:gate=true", "rfa:seed = 1", "mean")]
    ['performer:seed=3', 'rfa:gate=true,seed=3', 'rfa:seed = 1', 'mean']
    """
    if seed is None and _lacks(text, "seed"):
        seed = int(torch.randint(2**31, (), device="cpu"))
    return with_option(text, "seed", seed)


def with_option(text: str, option: str, value: Any) -> str:
    """The text of an attention with a value for an option that it has and that the text does not speak of.

    >>> with_option("softmax", "dropout", 0.1), with_option("mean", "dropout", 0.1)
    ('softmax:dropout=0.1', 'mean')
    """
    name, _, options = text.partition(":")
    return f"{name}:{options}{',' * bool(options)}{option}={value}" if _lacks(text, option) else text


def _lacks(text: str, option: str) -> bool:
    name, given = parse_attention(text)
    return option in attention_options(name) and option not in given


def build_attention(text: str, head_dim: int, num_heads: int, max_length: int | None = None) -> nn.Module:
    """Build the attention that ``text`` names, a module with the call of ``SchoenbAt``.

    Args:
        text: ``"name"`` or ``"name:option=value,..."``. The options are the keyword arguments of the
            attention's class; a kernel may also be a formula, as in ``kernel=(2+x)**2``. Every attention
            takes besides: ``causal=true``, which makes every call causal, or ``causal=both``, half of the
            heads causal and the other half seeing what comes after; ``rotary=true``, queries and keys are
            turned by their positions; ``conv=K``, a convolution of the values over K positions is added;
            ``head_norm=true``, the rows of every head are normalised at the end.
        head_dim: the dimension of one head.
        num_heads: the number of query heads.
        max_length: the longest sequence, for attentions that must know it.

    >>> build_attention("softmax:causal=true", head_dim=32, num_heads=2)
    Softmax(head_dim=32, num_heads=2)
    """
    if not isinstance(text, str):
        raise TypeError(f"an attention is named by a str, got {text!r}; known are {', '.join(_ATTENTIONS)}")
    name, options = parse_attention(text)
    given = {option: options.pop(option, words[0]) for option, words in _OF_ALL.items()}
    _check_words(name, given)
    try:
        if isinstance(options.get("kernel"), str):
            options["kernel"] = _find_kernel(options["kernel"])
        if given["causal"] and not getattr(_ATTENTIONS[name], "has_causal_form", True):
            raise ValueError("it has no causal form; leave causal= out, or take another attention")
        if given["rotary"]:
            _check_rotary(name, options)
        value_dim = options.get("value_dim") or head_dim
        if given["causal"] == "both":
            if num_heads % 2:
                raise ValueError(f"causal=both halves the heads, but there are {num_heads}")
            module: nn.Module = BothWays(
                *(_build(name, head_dim, num_heads // 2, max_length, options) for _ in range(2))
            )
        else:
            module = _build(name, head_dim, num_heads, max_length, options)
        if given["rotary"]:
            module = Rotary(module)
        if given["conv"] is not None:
            module = Convolved(module, num_heads, value_dim, given["conv"])
        if given["head_norm"]:
            module = HeadNorm(module, num_heads, value_dim)
    except (TypeError, ValueError) as error:
        raise ValueError(f"attention {text!r}: {error}") from error
    if given["causal"] is True:
        module.register_forward_pre_hook(_make_causal, with_kwargs=True)
    return module


def _build(
    name: str, head_dim: int, num_heads: int, max_length: int | None, options: dict[str, Any]
) -> nn.Module:
    attention = _ATTENTIONS[name]
    if "max_length" in inspect.signature(attention).parameters:
        options = options | {"max_length": max_length}
    return attention(head_dim, num_heads, **options)


def _check_words(name: str, given: dict[str, Any]) -> None:
    for option in ("causal", "rotary", "head_norm"):
        value, words = given[option], _OF_ALL[option]
        # By type too, as 1 is equal to True.
        if (type(value), value) not in [(type(word), word) for word in words]:
            known = ", ".join(str(word).lower() for word in words)
            raise ValueError(f"option {option} of attention {name!r} is one of {known}; got {value!r}")


def _parse_options(name: str, text: str, known: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"option {part!r} of attention {name!r} has no value; write {option}=value")
        if option not in known:
            raise ValueError(f"unknown option {option!r} of attention {name!r}; known are {', '.join(known)}")
        if option in options:
            raise ValueError(f"option {option!r} of attention {name!r} is given twice; leave one out")
        options[option] = _parse_value(value)
    return options


def _find_kernel(text: str) -> DotProductKernel:
    """A name, or a formula in x: of entire functions alone, as there is no place for a radius."""
    try:
        return DotProductKernel.from_expression(text) if re.search(r"\bx\b", text) else get_kernel(text)
    except ValueError as error:
        raise ValueError(
            f"{error}; in the text of an attention a kernel is a name, or a formula that needs no radius, as "
            "in kernel=(2+x)**2: give any other to SchoenbAt itself"
        ) from error


def _check_rotary(name: str, options: dict[str, Any]) -> None:
    """What subtracts a mean over channels from a turned row makes logits depend on more than distances."""
    option, default = {"schoenbat": ("normalization", "token"), "softmax": ("qk_norm", False)}.get(
        name, ("", None)
    )
    if options.get(option, default) not in ("l2", None, False):
        raise ValueError(f"rotary=true needs {option}=l2, which keeps distances: add it to the options")


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
