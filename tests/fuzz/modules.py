"""SchoenbAt, MultiheadSchoenbAt, PreSBN, PostSBN and every attention of the registry."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fuzz.attention import ORDINARY, assert_others_untouched, call_or_overflow
from fuzz.bounds import Expected, assert_within, expected_rmfa
from fuzz.cases import KERNELS, MAGNITUDES, Attention, attentions, make_kernel
from fuzz.harness import holds_for, refusal
from schoenbat import (
    MultiheadSchoenbAt,
    PostSBN,
    PreSBN,
    SchoenbAt,
    attention_names,
    build_attention,
)

CONSTRUCTIONS = ("exact-low", "unbiased", "paper", "paper-code")


def normalized(x: Tensor, mode: str | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pre-SBN in float64, and how far rows of `dtype` may be off."""
    rows = x.double()
    if mode is None:
        return rows, torch.zeros_like(rows)
    width, rounding = x.shape[-1], torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    size = rows.abs().amax(-1, keepdim=True)
    if mode == "token":
        rows = rows - rows.mean(-1, keepdim=True)
    norm = rows.square().sum(-1, keepdim=True).clamp(min=width * eps).sqrt()
    lost = rounding * (width + 4) * (size + rows.abs()) / norm
    return rows / norm, lost * 4 + torch.finfo(dtype).eps * (rows / norm).abs() + torch.finfo(dtype).tiny


def powered(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Post-SBN in float64."""
    beta = beta.double().abs()[:, None]
    return gamma.double()[:, None] * x * (x.square() + 1e-6).pow((beta - 1) / 2)


@dataclass(frozen=True)
class Module:
    inputs: Attention
    kernel: str
    construction: str
    num_features: int
    normalization: str | None
    scale: str | float | None
    post: bool
    trainable: bool
    training: bool
    eps: float
    seed: int

    def build(self) -> SchoenbAt:
        radius = make_kernel(self.kernel).radius
        scale = self.scale
        if not isinstance(scale, str) and (scale or self.inputs.head_dim**-0.5) >= radius:
            scale = 0.9 * radius
        module = SchoenbAt(
            self.inputs.head_dim,
            self.inputs.heads * self.inputs.groups,
            self.num_features,
            make_kernel(self.kernel),
            construction=self.construction,
            value_dim=self.inputs.value_dim,
            normalization=self.normalization,
            scale=scale,
            post=self.post,
            trainable_features=self.trainable,
            eps=self.eps,
            seed=self.seed,
        )
        if module.post is not None:
            with torch.no_grad():
                generator = torch.Generator().manual_seed(self.seed)
                for parameter in (module.post.gamma, module.post.beta):
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        return module.train(self.training)


MODULES = st.builds(
    Module,
    inputs=attentions(one_batch_dim=True),
    kernel=st.sampled_from(KERNELS),
    construction=st.sampled_from(CONSTRUCTIONS),
    num_features=st.sampled_from([2, 3, 17, 64]),
    normalization=st.sampled_from(["token", "token", "l2", None]),
    scale=st.sampled_from(["learned", None, 0.5, 2.0]),
    post=st.booleans(),
    trainable=st.booleans(),
    training=st.booleans(),
    eps=st.sampled_from([1e-13, 1e-5]),
    seed=st.integers(0, 1000),
)


def expected_module(case: Module, module: SchoenbAt, tensors: tuple[Tensor, ...]) -> Expected:
    """The three parts one after the other, in float64, with the errors of each carried on."""
    query, key, value = tensors
    dtype = query.dtype
    rows = [normalized(x, case.normalization, case.eps, dtype) for x in (query, key)]
    expected = expected_rmfa(
        rows[0][0],
        rows[1][0],
        value,
        module.features,
        dtype=dtype,
        row_error=(rows[0][1], rows[1][1]),
        scale=module.scale,
        **case.inputs.options(),
    )
    if module.post is None:
        return expected
    out, error = expected.out, expected.error + 2 * torch.finfo(dtype).eps * expected.out.abs()
    parameters = module.post.gamma.detach(), module.post.beta.detach()
    after = powered(out, *parameters)
    around = torch.stack([(powered(out + sign * error, *parameters) - after).abs() for sign in (-1, 1)])
    rounding = 16 * torch.finfo(dtype).eps * after.abs() + torch.finfo(dtype).tiny
    error = torch.where(error.isfinite(), around.amax(0) + rounding, math.inf)
    # What the power takes beyond the range is infinite, as in every other elementwise function.
    error = torch.where(after.abs() + error > torch.finfo(dtype).max, math.inf, error)
    largest = torch.finfo(dtype).max / 1e3
    return Expected(after, error, expected.overflows or bool((after.abs() > largest).any()))


@holds_for(MODULES, share=10)
def schoenbat_is_its_three_parts(case: Module) -> None:
    module, tensors = case.build(), case.inputs.tensors()
    expected = expected_module(case, module, tensors)
    out = call_or_overflow(lambda: module(*tensors, **case.inputs.options()).detach(), expected)
    if out is not None:
        assert out.dtype == tensors[0].dtype
        assert_within(out, expected)


@holds_for(
    st.builds(
        replace,
        MODULES.filter(lambda case: case.inputs.batch[0] > 0),
        inputs=attentions(ORDINARY, one_batch_dim=True, equal_lengths=True),
    ),
    4,
)
def steps_of_a_module_are_its_causal_call(case: Module) -> None:
    module = case.build().eval()
    query, key, value = (x.double() for x in case.inputs.tensors())
    module = module.double()
    options = case.inputs.options() | {"is_causal": True}
    mask = options["key_mask"]
    results: list[Tensor] = []
    if refusal(lambda: results.append(module(query, key, value, **options)), "range") is not None:
        return
    state, rows, cut = None, [], case.seed % (case.inputs.keys + 1)
    for span in (slice(0, cut), slice(cut, None)):
        part = (x[..., span, :] for x in (query, key, value))
        out, state = module.step(*part, state, key_mask=None if mask is None else mask[:, span])
        rows.append(out)
    expected = expected_module(
        replace(case, inputs=replace(case.inputs, dtype="float64", is_causal=True)),
        module,
        (query, key, value),
    )
    assert_within(torch.cat(rows, dim=-2).detach(), expected)
    assert_within(results[0].detach(), expected)


@dataclass(frozen=True)
class AnyAttention:
    text: str
    inputs: Attention
    training: bool
    query_mask: bool

    def build(self) -> torch.nn.Module:
        torch.manual_seed(0)
        length = max(self.inputs.queries, self.inputs.keys, 1)
        heads = self.inputs.heads * self.inputs.groups
        return build_attention(self.text, self.inputs.head_dim, heads, length).train(self.training)

    def options(self) -> dict[str, Any]:
        options = self.inputs.options()
        mask = options["key_mask"]
        if self.query_mask and mask is not None and self.inputs.queries == self.inputs.keys:
            options["query_mask"] = mask
        return options


TEXTS = (
    *attention_names(),
    *("softmax:naive=true", "softmax:qk_norm=true", "rfa:gate=true", "reformer:chunk_size=4,num_rounds=1"),
    *("nystromformer:num_landmarks=3", "nystromformer:conv_kernel_size=3", "skyformer:num_landmarks=3"),
    *(
        "informer:num_queries=2,num_samples=3",
        "bigbird:block_size=2,num_random=1",
        "performer:num_features=5",
    ),
    *(
        "schoenbat:normalization=batch",
        "schoenbat:window=3",
        "schoenbat:center_keys=true",
        "schoenbat:kernel=inv",
    ),
)


@st.composite
def _any_attention(draw, magnitudes=MAGNITUDES) -> AnyAttention:
    inputs = draw(attentions(magnitudes, one_batch_dim=True, equal_lengths=draw(st.booleans())))
    inputs = replace(inputs, value_dim=inputs.head_dim)
    return AnyAttention(draw(st.sampled_from(TEXTS)), inputs, draw(st.booleans()), draw(st.booleans()))


@holds_for(_any_attention(), share=14)
def every_attention_gives_numbers_where_float64_does(case: AnyAttention) -> None:
    module, tensors, options = case.build(), case.inputs.tensors(), case.options()
    exact, refused = [], None
    wide = copy.deepcopy(module).double()
    torch.manual_seed(1)
    refused = refusal(lambda: exact.append(wide(*(x.double() for x in tensors), **options)))
    torch.manual_seed(1)
    results: list[Tensor] = []
    message = refusal(lambda: results.append(module(*tensors, **options)))
    if message is not None:
        ordinary = max(case.inputs.magnitudes) <= 10
        assert refused is not None or not ordinary or "range" in message, (
            f"refused in {case.inputs.dtype} alone: {message}"
        )
        return
    out = results[0].detach()
    assert out.dtype == tensors[0].dtype
    assert out.shape == (*tensors[0].shape[:-1], tensors[2].shape[-1])
    if refused is None:
        assert not (out.isnan() & exact[0].isfinite()).any(), "NaN where float64 is finite"
    mask = options["key_mask"]
    if mask is not None and out.numel():
        without = out[~mask.any(-1)]
        assert (without == 0).all(), "a row without keys is not zero"


@holds_for(_any_attention(ORDINARY), share=5)
def poison_stays_in_its_batch_row_of_every_attention(case: AnyAttention) -> None:
    if case.inputs.batch[0] < 2 or not case.inputs.queries or not case.inputs.keys:
        return
    module = case.build()
    if module.training and "batch" in case.text:
        return  # statistics of the whole batch are what it asked for
    # Copies, as the others are: how memory is aligned decides about the last bit of PyTorch's softmax.
    clean = [x.contiguous().clone() for x in case.inputs.tensors()]
    poison = (math.nan, math.inf)[case.inputs.seed % 2]
    dirty = [x.clone() for x in clean]
    dirty[case.inputs.seed % 3][0, 0, -1, 0] = poison
    others = torch.arange(clean[0].shape[0]) > 0
    options = case.options()

    def call(*tensors: Tensor) -> Tensor:
        torch.manual_seed(1)
        return module(*tensors, **options).detach()

    results: list[Tensor] = []
    if refusal(lambda: results.append(call(*clean))) is None:
        assert_others_untouched(call, clean, dirty, others)


@dataclass(frozen=True)
class Multihead:
    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    kdim: int | None
    batch_first: bool
    bias: bool
    add_bias_kv: bool
    add_zero_attn: bool
    padding: str | None
    causal: str | None
    weights: bool
    batched: bool
    magnitude: float
    seed: int


MULTIHEADS = st.builds(
    Multihead,
    batch=st.integers(0, 3),
    queries=st.integers(0, 8),
    keys=st.integers(0, 8),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 8]),
    kdim=st.sampled_from([None, 1, 5]),
    batch_first=st.booleans(),
    bias=st.booleans(),
    add_bias_kv=st.booleans(),
    add_zero_attn=st.booleans(),
    padding=st.sampled_from([None, "bool", "float", "all"]),
    causal=st.sampled_from([None, "hint", "mask", "float mask", "other mask"]),
    weights=st.booleans(),
    batched=st.booleans(),
    magnitude=st.sampled_from([1.0, 1e-30, 1e-3, 1e3, 1e10, 1e15]),
    seed=st.integers(0, 10**6),
)


@holds_for(MULTIHEADS, share=6)
def multihead_is_projections_around_schoenbat(case: Multihead) -> None:
    width, generator = case.heads * case.head_dim, torch.Generator().manual_seed(case.seed)
    torch.manual_seed(case.seed)
    module = MultiheadSchoenbAt(
        width,
        case.heads,
        bias=case.bias,
        add_bias_kv=case.add_bias_kv,
        add_zero_attn=case.add_zero_attn,
        kdim=case.kdim,
        vdim=case.kdim,
        batch_first=True,
        num_features=16,
        seed=case.seed,
        dtype=torch.float64,
    ).eval()
    module.batch_first = case.batch_first or not case.batched
    lead = (case.batch,) if case.batched else ()
    query = torch.randn(*lead, case.queries, width, generator=generator, dtype=torch.float64) * case.magnitude
    key, value = (
        torch.randn(*lead, case.keys, case.kdim or width, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    ignored = None
    if case.padding is not None:
        ignored = torch.rand(*lead, case.keys, generator=generator) > (0.5 if case.padding != "all" else -1.0)
    padding = ignored
    if case.padding == "float":
        padding = torch.zeros(ignored.shape, dtype=torch.float64).masked_fill(ignored, -math.inf)
    future = torch.ones(case.queries, case.keys, dtype=torch.bool).triu(1)
    mask = {
        "mask": future,
        "float mask": torch.zeros(future.shape).masked_fill(future, -math.inf),
        "other mask": torch.rand(future.shape, generator=generator) > 0.5,
    }.get(case.causal)
    swap = case.batched and not case.batch_first
    given = [x.transpose(0, 1) if swap else x for x in (query, key, value)]
    results: list[tuple] = []
    refused = refusal(
        lambda: results.append(module(*given, padding, case.weights, mask, True, case.causal == "hint"))
    )
    square = case.queries == case.keys
    if refused is not None:
        assert "mask" in refused, refused
        assert case.causal in ("mask", "float mask", "other mask"), refused
        assert not square or case.causal == "other mask", refused
        return
    out, weights = results[0]
    out = out.transpose(0, 1) if swap else out
    assert out.shape == (*lead, case.queries, width)
    assert out.isfinite().all()
    causal = case.causal == "hint" or (mask is not None and bool((mask != 0).any()))
    rows = [x if case.batched else x[None] for x in (query, key, value)]
    q, k, v = module._project(*rows)
    key_mask = None if ignored is None else ~(ignored if case.batched else ignored[None])
    blind = max(0, case.queries - case.keys) if causal else 0
    k, v, key_mask = module._add_keys(k, v, key_mask, blind)
    attended = module.attention(q, k, v, key_mask=key_mask, is_causal=causal)
    again = module.out_proj(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, again if case.batched else again[0])
    assert (weights is not None) == case.weights
    if weights is not None:
        added = case.add_bias_kv + case.add_zero_attn
        assert weights.shape == (*lead, case.queries, case.keys + added)
        sees = torch.ones(weights.shape, dtype=torch.bool) if key_mask is None else None
        if sees is not None and not causal and weights.numel():
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=weights.dtype))


@dataclass(frozen=True)
class Norm:
    mode: str
    inputs: Attention
    eps: float
    training: bool


NORMS = st.builds(
    Norm,
    st.sampled_from(["token", "l2", "batch"]),
    attentions(one_batch_dim=True),
    st.sampled_from([1e-13, 1e-5]),
    st.booleans(),
)


@holds_for(NORMS, share=4)
def rows_are_normalized(case: Norm) -> None:
    x = case.inputs.tensors()[0]
    module = PreSBN(case.mode, x.shape[-3], x.shape[-1], eps=case.eps).train(case.training)
    got = module(x)
    assert got.dtype == x.dtype
    assert not got.isnan().any(), "NaN for finite rows"
    norms = got.double().norm(dim=-1)
    assert (norms <= 1 + 4 * torch.finfo(x.dtype).eps * x.shape[-1]).all(), "a row is longer than 1"
    if case.mode == "batch":
        return
    rows, error = normalized(x, case.mode, case.eps, x.dtype)
    assert_within(got, Expected(rows, error, False))


@holds_for(st.tuples(attentions(one_batch_dim=True), st.floats(-2, 2), st.floats(-1, 1)), share=2)
def powers_are_odd_and_smooth(case: tuple[Attention, float, float]) -> None:
    inputs, gamma, beta = case
    x = inputs.tensors()[2]
    if not x.shape[-3]:
        return
    module = PostSBN(x.shape[-3], x.shape[-1])
    with torch.no_grad():
        module.gamma += gamma
        module.beta += beta
        got, mirrored = module(x), module(-x)
    expected = powered(x.double(), module.gamma.detach(), module.beta.detach())
    assert torch.equal(got, -mirrored)
    compute = torch.promote_types(x.dtype, torch.float32)
    fits = expected.abs() < torch.finfo(x.dtype).max / 1e3
    assert not (got.isnan() & (expected.abs() < torch.finfo(x.dtype).max / 1e3)).any(), (
        "NaN where the oracle is finite"
    )
    error = (
        64 * (torch.finfo(x.dtype).eps + torch.finfo(compute).eps * 10) * expected.abs()
        + torch.finfo(x.dtype).tiny * 2
    )
    assert_within(torch.where(fits, got, 0.0), Expected(torch.where(fits, expected, 0.0), error, False))
