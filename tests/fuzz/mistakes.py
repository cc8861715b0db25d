"""Arguments that cannot be right: each is refused by an error that names it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from fuzz.cases import SEEDS
from fuzz.harness import holds_for, must_refuse
from schoenbat import (
    DotProductKernel,
    MaclaurinFeatures,
    MultiheadSchoenbAt,
    PostSBN,
    PreSBN,
    RMFAState,
    SchoenbAt,
    attention_names,
    build_attention,
    kernel,
    kernelized_attention,
    polynomial,
    reseed,
    rmfa,
    rmfa_step,
)
from schoenbat.data import listops, pathfinder
from schoenbat.training.protocol import Protocol

BATCH, HEADS, LENGTH, DIM, WIDTH = 2, 2, 5, 4, 3


def _features() -> MaclaurinFeatures:
    return MaclaurinFeatures(DIM, 16, seed=0)


def _step(query, key, value, key_mask=None, scale=None, enable_gqa=False, **more):
    state = RMFAState.zeros(_features(), BATCH, HEADS, WIDTH)
    return rmfa_step(
        query, key, value, _features(), state, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa, **more
    )


def _module(name: str) -> Callable[..., Any]:
    """A registry's attention as a function; those that are self-attention have as many queries as keys."""

    def call(query, key, value, key_mask=None, scale=None, **more):
        if name == "schoenbat":
            module = SchoenbAt(DIM, HEADS, 16, value_dim=WIDTH)
        else:
            module = build_attention(name, DIM, HEADS, max_length=LENGTH)
        return module(query, key, value, key_mask=key_mask, **more)

    return call


CALLS: dict[str, Callable[..., Any]] = {
    "rmfa": lambda query, key, value, **more: rmfa(query, key, value, _features(), **more),
    "kernelized_attention": kernelized_attention,
    "rmfa_step": _step,
    **{name: _module(name) for name in attention_names()},
}
TAKE_A_SCALE = ("rmfa", "kernelized_attention", "rmfa_step")


def _of(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype)


# What is done to a good tensor, and whether an attention has to mind.
CORRUPTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "nothing": lambda x: None,
    "a number": lambda x: 1.0,
    "text": lambda x: "tensor",
    "numpy": lambda x: x.numpy(),
    "int64": _of(torch.int64),
    "bool": _of(torch.bool),
    "complex": _of(torch.complex64),
    "float8": _of(torch.float8_e4m3fn),
    "another dtype": _of(torch.float64),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "one row": lambda x: x[0, 0, 0],
    "fewer dimensions": lambda x: x[0],
    "more dimensions": lambda x: x[None],
    "a batch row too many": lambda x: torch.cat([x, x[:1]]),
    "a head too many": lambda x: torch.cat([x, x[:, :1]], dim=1),
    "no heads": lambda x: x[:, :0],
    "no columns": lambda x: x[..., :0],
}
# Masks are checked against the shape and dtype they must have.
MASK_CORRUPTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "a number": lambda x: 1.0,
    "text": lambda x: "mask",
    "float": lambda x: x.float(),
    "int": lambda x: x.long(),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "one more": lambda x: torch.cat([x, x[:, :1]], dim=1),
    "one fewer": lambda x: x[:, 1:],
    "transposed": lambda x: x.mT,
    "flat": lambda x: x.flatten(),
    "for each head": lambda x: x[:, None],
    "a batch row too many": lambda x: torch.cat([x, x[:1]]),
}


@dataclass(frozen=True)
class Mistake:
    call: str
    argument: str
    corruption: str
    seed: int


def _mistakes(draw) -> Mistake:
    argument = draw(st.sampled_from(["query", "key", "value", "key_mask"]))
    table = MASK_CORRUPTIONS if argument == "key_mask" else CORRUPTIONS
    return Mistake(
        draw(st.sampled_from(sorted(CALLS))), argument, draw(st.sampled_from(sorted(table))), draw(SEEDS)
    )


@holds_for(st.composite(_mistakes)(), share=8)
def corrupted_inputs_are_named(case: Mistake) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    width = DIM if case.call in attention_names() and case.call != "schoenbat" else WIDTH
    shapes = {"query": DIM, "key": DIM, "value": width}
    good: dict[str, Any] = {
        name: torch.randn(BATCH, HEADS, LENGTH, size, generator=generator) for name, size in shapes.items()
    }
    good["key_mask"] = torch.rand(BATCH, LENGTH, generator=generator) > 0.3
    if case.argument == "value" and case.corruption == "no columns" and case.call != "schoenbat":
        return  # values without columns have an answer, an empty one
    table = MASK_CORRUPTIONS if case.argument == "key_mask" else CORRUPTIONS
    bad = good | {case.argument: table[case.corruption](good[case.argument])}
    CALLS[case.call](**good)
    must_refuse(lambda: CALLS[case.call](**bad))


@dataclass(frozen=True)
class BadOption:
    what: str
    option: str
    value: Any


NOT_COUNTS = (-1, 1.5, "3", None, math.nan, 2.0)
NOT_SCALES = (math.nan, math.inf, -math.inf, "2", 1j, [1.0])
CONSTRUCTORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "MaclaurinFeatures": (MaclaurinFeatures, {"head_dim": 4, "num_features": 8}),
    "SchoenbAt": (SchoenbAt, {"head_dim": 4, "num_heads": 2, "num_features": 8}),
    "MultiheadSchoenbAt": (MultiheadSchoenbAt, {"embed_dim": 8, "num_heads": 2}),
    "PreSBN": (PreSBN, {"mode": "batch", "num_heads": 2, "head_dim": 4}),
    "PostSBN": (PostSBN, {"num_heads": 2, "value_dim": 4}),
    "RMFAState.zeros": (
        lambda **o: RMFAState.zeros(_features(), **o),
        {"batch": 1, "kv_heads": 1, "value_dim": 1},
    ),
    "kernel": (kernel, {"name_or_kernel": "exp"}),
    "polynomial": (polynomial, {"degree": 2, "offset": 1.0}),
    "from_expression": (DotProductKernel.from_expression, {"expression": "exp(x)", "radius": 1.0}),
    "coefficients": (lambda max_degree: kernel("exp").coefficients(max_degree), {"max_degree": 3}),
    "Protocol.paper": (lambda **o: Protocol.paper("text", **o), {}),
    "listops.generate": (
        lambda **o: listops.generate(**o),
        {"count": 1, "seed": 0, "min_length": 2, "max_length": 30},
    ),
    "pathfinder.generate": (lambda **o: pathfinder.generate(**o), {"count": 0, "seed": 0}),
    "reseed": (lambda seed: reseed(_features(), seed), {"seed": 0}),
    "build_attention": (build_attention, {"text": "schoenbat", "head_dim": 4, "num_heads": 2}),
}
BAD_OPTIONS: list[BadOption] = [
    *(
        BadOption(what, option, value)
        for what, options in {
            "MaclaurinFeatures": ("head_dim", "num_features"),
            "SchoenbAt": ("head_dim", "num_heads", "num_features"),
            "MultiheadSchoenbAt": ("embed_dim", "num_heads"),
            "PostSBN": ("num_heads", "value_dim"),
            "RMFAState.zeros": ("batch", "kv_heads", "value_dim"),
            "polynomial": ("degree",),
            "coefficients": ("max_degree",),
            "listops.generate": ("count", "min_length", "max_length", "workers"),
            "pathfinder.generate": ("count",),
            "build_attention": ("head_dim", "num_heads"),
        }.items()
        for option in options
        for value in NOT_COUNTS
    ),
    *(BadOption("MaclaurinFeatures", "num_heads", value) for value in (0, -1, 1.5, "2")),
    *(BadOption("SchoenbAt", "value_dim", value) for value in (-1, 1.5, "2")),
    *(
        BadOption("MultiheadSchoenbAt", option, value)
        for option in ("kdim", "vdim")
        for value in (-1, 1.5, "2")
    ),
    *(BadOption("MultiheadSchoenbAt", "dropout", value) for value in (-0.1, 1.1, math.nan, "0.5")),
    *(BadOption("PreSBN", option, value) for option in ("num_heads", "head_dim") for value in NOT_COUNTS),
    *(BadOption("PreSBN", "mode", value) for value in ("tokens", None, 3)),
    *(
        BadOption(w, "eps", v)
        for w in ("PreSBN", "SchoenbAt")
        for v in (-1.0, 0.0, math.nan, "0", None, math.inf)
    ),
    *(BadOption("PreSBN", "momentum", value) for value in (-0.1, 1.5, math.nan, "0.1", None)),
    *(
        BadOption(what, "scale", value)
        for what in ("MaclaurinFeatures", "SchoenbAt")
        for value in (*NOT_SCALES, 0.0, -1.0)
    ),
    *(
        BadOption(what, "kernel", value)
        for what in ("MaclaurinFeatures", "SchoenbAt")
        for value in ("relu", 3, None, "", polynomial(2, 0.0))
    ),
    *(
        BadOption(what, "construction", value)
        for what in ("MaclaurinFeatures", "SchoenbAt")
        for value in ("exact", None, 3, "", [])
    ),
    *(
        BadOption(what, "dtype", value)
        for what in ("MaclaurinFeatures", "SchoenbAt", "MultiheadSchoenbAt", "RMFAState.zeros")
        for value in (torch.int64, torch.bool, torch.complex64, "float32")
    ),
    *(
        BadOption(what, "seed", value)
        for what in ("MaclaurinFeatures", "SchoenbAt", "reseed")
        for value in (1.5, "0", 2**80, -(2**80), [])
    ),
    *(BadOption("SchoenbAt", "normalization", value) for value in ("tokens", 3, "", [])),
    BadOption("reseed", "seed", None),
    *(BadOption("kernel", "name_or_kernel", value) for value in ("relu", "", None, 3, [], torch.exp)),
    *(BadOption("polynomial", "offset", value) for value in (-1.0, math.nan, math.inf, "1", None, 1e300)),
    *(BadOption("polynomial", "degree", value) for value in (0, 65, True)),
    *(BadOption("from_expression", "radius", value) for value in (0.0, -1.0, math.nan, "1", None)),
    *(
        BadOption("from_expression", "expression", value)
        for value in ("", "x +", None, 3, "sin(x)", "y", "x.real")
    ),
    *(
        BadOption("Protocol.paper", option, value)
        for option in ("steps", "batch_size", "evaluate_every", "warmup", "embedding_rows")
        for value in (0, *NOT_COUNTS)
    ),
    *(
        BadOption("Protocol.paper", "learning_rate", value)
        for value in (0.0, -1.0, math.nan, math.inf, "1", None)
    ),
    *(BadOption("Protocol.paper", "dropout", value) for value in (-0.1, 1.1, math.nan, "0", None)),
    *(BadOption("Protocol.paper", "eps", value) for value in (-1.0, math.nan, "0", None)),
    *(BadOption("Protocol.paper", "weight_decay", value) for value in (-1.0, math.nan, "0", None)),
    *(BadOption("Protocol.paper", "clip_value", value) for value in (-1.0, 0.0, math.nan, "0", None)),
    *(BadOption("Protocol.paper", "select_after", value) for value in (-0.1, 1.1, math.nan, "0", None)),
    *(BadOption("Protocol.paper", "betas", value) for value in ((0.9,), (1.0, 0.9), (0.9, -0.1), 0.9, None)),
    *(BadOption("listops.generate", "seed", value) for value in (None, 1.5)),
    *(
        BadOption("build_attention", "text", value)
        for value in (None, 3, "", ":", "softmax:a", "softmax:a=b")
    ),
]


@holds_for(st.sampled_from(BAD_OPTIONS), share=5)
def bad_options_are_named(case: BadOption) -> None:
    make, good = CONSTRUCTORS[case.what]
    must_refuse(lambda: make(**{**good, case.option: case.value}))
