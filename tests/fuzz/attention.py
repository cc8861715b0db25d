"""rmfa, rmfa_step, RMFAState and kernelized_attention."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from oracle import assert_matches_reference
from torch import Tensor

from fuzz.bounds import Expected, assert_within, expected_exact, expected_rmfa
from fuzz.cases import KERNELS, MAPS, Attention, Map, attentions, make_kernel
from fuzz.harness import holds_for, refusal
from schoenbat import MaclaurinFeatures, RMFAState, kernelized_attention, rmfa, rmfa_step

SCALES = st.one_of(st.none(), st.sampled_from([0.0, -1.0, 1e-30, 0.5, 2.0, 1e5]), st.just("per head"))
ORDINARY = st.sampled_from([1.0, 0.1, 1e-3, 2.0])


@dataclass(frozen=True)
class Call:
    """A call of `rmfa`."""

    inputs: Attention
    map: Map
    scale: float | str | None
    grad: bool = False

    def features(self) -> MaclaurinFeatures:
        return self.map.build(self.inputs.head_dim, self.inputs.heads)

    def scale_value(self) -> float | Tensor | None:
        if self.scale != "per head":
            return self.scale
        heads = self.inputs.heads * self.inputs.groups
        return torch.rand(heads, generator=torch.Generator().manual_seed(self.inputs.seed)) + 0.1


def call_or_overflow(call, expected: Expected):
    """The result of a call, or None where it is refused for an overflow that there is."""
    results: list[Tensor] = []
    message = refusal(lambda: results.append(call()), "range")
    assert message is None or expected.overflows, f"refused without reason: {message}"
    return results[0] if results else None


@holds_for(st.builds(Call, attentions(), MAPS, SCALES, st.booleans()), share=20)
def rmfa_is_the_specification(case: Call) -> None:
    query, key, value = case.inputs.tensors()
    features, options = case.features(), case.inputs.options() | {"scale": case.scale_value()}
    expected = expected_rmfa(query, key, value, features, dtype=query.dtype, **options)
    for tensor in (query, key, value):
        tensor.requires_grad_(case.grad)
    out = call_or_overflow(lambda: rmfa(query, key, value, features, **options), expected)
    if out is None:
        return
    assert out.dtype == query.dtype
    assert_within(out.detach(), expected)
    # Where features or their quotients with the floor come near the range, gradients go beyond it first.
    ordinary = max(case.inputs.magnitudes) <= 10 and case.scale != 1e5 and not expected.overflows
    if case.grad and ordinary and out.isfinite().all():
        grads = torch.autograd.grad(out.float().sum(), [query, key, value], allow_unused=True)
        assert not any(grad.isnan().any() for grad in grads if grad is not None), "NaN in a gradient"


@holds_for(
    st.builds(Call, attentions(ORDINARY, ("float64",)), MAPS, st.sampled_from([None, 0.5, "per head"])), 6
)
def gradients_are_those_of_the_specification(case: Call) -> None:
    query, key, value = (x.clone() for x in case.inputs.tensors())
    features, options = case.features().double(), case.inputs.options()
    if not out_is_smooth(query, key, value, features, options):
        return
    scale = case.scale_value()
    scale = scale.double() if isinstance(scale, Tensor) else scale
    assert_matches_reference(query, key, value, features, rtol=1e-7, scale=scale, **options)


def out_is_smooth(
    query: Tensor, key: Tensor, value: Tensor, features: MaclaurinFeatures, options: dict
) -> bool:
    """Whether no denominator is so small that its gradients have no correct digits left."""
    expected = expected_rmfa(query, key, value, features, dtype=torch.float64, **options)
    return bool((expected.error < 1e-10).all())


@dataclass(frozen=True)
class Decoding:
    """A sequence in pieces."""

    call: Call
    cuts: tuple[int, ...]

    def pieces(self) -> list[slice]:
        ends = sorted(min(cut, self.call.inputs.keys) for cut in self.cuts)
        return [slice(a, b) for a, b in zip([0, *ends], [*ends, self.call.inputs.keys], strict=True)]


DECODINGS = st.builds(
    Decoding,
    st.builds(
        Call,
        attentions(one_batch_dim=True, equal_lengths=True),
        MAPS,
        st.sampled_from([None, 0.5, "per head"]),
    ),
    st.lists(st.integers(0, 300), max_size=3).map(tuple),
)


@holds_for(DECODINGS, share=8)
def steps_are_one_causal_call(case: Decoding) -> None:
    query, key, value = case.call.inputs.tensors()
    features, options = case.call.features(), case.call.inputs.options()
    mask, shared = (
        options.pop("key_mask"),
        {"enable_gqa": options["enable_gqa"], "scale": case.call.scale_value()},
    )
    expected = expected_rmfa(
        query, key, value, features, dtype=query.dtype, key_mask=mask, is_causal=True, **shared
    )
    (batch,) = case.call.inputs.batch
    state = RMFAState.zeros(features, batch, case.call.inputs.heads, value.shape[-1], dtype=query.dtype)

    def decode() -> Tensor:
        nonlocal state
        rows = []
        for span in case.pieces():
            part = (x[..., span, :] for x in (query, key, value))
            piece = None if mask is None else mask[..., span]
            out, state = rmfa_step(*part, features, state, key_mask=piece, **shared)
            rows.append(out)
        return torch.cat(rows, dim=-2)

    out = call_or_overflow(decode, expected)
    if out is None:
        return
    assert_within(out.detach(), expected)
    counted = torch.full((batch,), case.call.inputs.keys) if mask is None else mask.sum(-1)
    assert torch.equal(state.count, counted)


@holds_for(DECODINGS, share=8)
def a_state_is_read_as_the_whole_sequence(case: Decoding) -> None:
    query, key, value = case.call.inputs.tensors()
    features, options = case.call.features(), case.call.inputs.options()
    mask, scale = options["key_mask"], case.call.scale_value()
    expected = expected_rmfa(
        query, key, value, features, dtype=query.dtype, key_mask=mask, enable_gqa=True, scale=scale
    )
    (batch,) = case.call.inputs.batch
    state = RMFAState.zeros(features, batch, case.call.inputs.heads, value.shape[-1], dtype=query.dtype)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(case.call.inputs.seed))

    def read() -> Tensor:
        for span in case.pieces():
            state.update(
                key[..., span, :], value[..., span, :], features, None if mask is None else mask[..., span]
            )
        return state.reorder(order).read(query[order], features, scale)

    out = call_or_overflow(read, expected)
    if out is not None:
        assert_within(out.detach()[order.argsort()], expected)


@dataclass(frozen=True)
class Poisoned:
    """A call in which one batch row holds a NaN or an infinity."""

    call: Call
    where: str
    poison: float


POISONED = st.builds(
    Poisoned,
    st.builds(Call, attentions(ORDINARY, one_batch_dim=True), MAPS, st.none()),
    st.sampled_from(["query", "key", "value"]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)


def poisoned_tensors(case: Poisoned) -> tuple[list[Tensor], list[Tensor], Tensor] | None:
    """Clean tensors, the same with poison in the first batch row, and which rows are clean."""
    clean = [x.contiguous().clone() for x in case.call.inputs.tensors()]
    place = ["query", "key", "value"].index(case.where)
    if not clean[place].numel():
        return None
    dirty = [x.clone() for x in clean]
    # The last position: causal rows before it must stay clean as well, and it has a batch row to itself.
    dirty[place][0, 0, -1, 0] = case.poison
    others = torch.ones(clean[0].shape[0], dtype=torch.bool)
    others[0] = False
    return clean, dirty, others


def assert_others_untouched(call, clean: list[Tensor], dirty: list[Tensor], others: Tensor) -> None:
    results: list[Tensor] = []
    refused = [refusal(lambda x=x: results.append(call(*x))) for x in (clean, dirty)]
    if refused == [None, None]:
        assert torch.equal(results[0][others], results[1][others]), "one batch row has changed another"


@holds_for(POISONED, share=6)
def poison_stays_in_its_batch_row(case: Poisoned) -> None:
    tensors, features = poisoned_tensors(case), case.call.features()
    if tensors is None:
        return
    options = case.call.inputs.options()
    assert_others_untouched(lambda q, k, v: rmfa(q, k, v, features, **options), *tensors)
    mask, batch = options["key_mask"], tensors[0][0].shape[0]

    def through_a_state(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        state = RMFAState.zeros(features, batch, key.shape[1], value.shape[-1], dtype=key.dtype)
        return state.update(key, value, features, mask).read(query, features)

    assert_others_untouched(through_a_state, *tensors)


@holds_for(POISONED, share=2)
def masked_poison_is_not_there(case: Poisoned) -> None:
    tensors, features = poisoned_tensors(case), case.call.features()
    if tensors is None or case.where == "query":
        return
    clean, dirty, _ = tensors
    mask = torch.ones(clean[1].shape[0], clean[1].shape[-2], dtype=torch.bool)
    mask[0, -1] = False
    options = case.call.inputs.options() | {"key_mask": mask}
    everywhere = torch.ones(clean[0].shape[0], dtype=torch.bool)
    for call in (
        lambda q, k, v: rmfa(q, k, v, features, **options),
        lambda q, k, v: kernelized_attention(q, k, v, **options),
    ):
        assert_others_untouched(call, clean, dirty, everywhere)


@dataclass(frozen=True)
class Exact:
    """A call of `kernelized_attention`."""

    inputs: Attention
    kernel: str
    scale: float | None


EXACT = st.builds(
    Exact,
    attentions(),
    st.sampled_from(KERNELS),
    st.one_of(st.none(), st.sampled_from([0.0, -1.0, 1e-30, 3.0, 1e5])),
)


@holds_for(EXACT, share=12)
def kernelized_attention_is_the_formula(case: Exact) -> None:
    query, key, value = case.inputs.tensors()
    kernel, options = make_kernel(case.kernel), case.inputs.options() | {"scale": case.scale}
    expected = expected_exact(query, key, value, kernel, dtype=query.dtype, **options)
    if expected is None:
        # A logit may be so far beyond the radius that it does not fit the dtype: that is said then.
        message = refusal(lambda: kernelized_attention(query, key, value, kernel, **options))
        assert message is None or "radius" in message or "beyond the range" in message, message
        return
    out = call_or_overflow(lambda: kernelized_attention(query, key, value, kernel, **options), expected)
    if out is not None:
        assert_within(out, expected)


@holds_for(POISONED, share=3)
def poison_stays_in_its_batch_row_of_exact_attention(case: Poisoned) -> None:
    tensors = poisoned_tensors(case)
    if tensors is None:
        return
    options = case.call.inputs.options() | {"scale": 1e-3}
    kernel = make_kernel(case.call.map.kernel)
    assert_others_untouched(lambda q, k, v: kernelized_attention(q, k, v, kernel, **options), *tensors)
