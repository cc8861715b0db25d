"""Attention with a window, and of packed sequences."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from fuzz.attention import ORDINARY, Call
from fuzz.bounds import assert_within, expected_rmfa
from fuzz.cases import MAPS, Attention, attentions
from fuzz.harness import holds_for, must_refuse, refusal
from schoenbat import MaclaurinFeatures, RMFAWindowState, rmfa_varlen, rmfa_window, rmfa_window_step
from schoenbat.constructions import CONSTRUCTIONS


@dataclass(frozen=True)
class Windowed:
    inputs: Attention
    width: int
    num_features: int
    construction: str


WINDOWED = st.builds(
    Windowed,
    attentions(one_batch_dim=True, equal_lengths=True),
    st.integers(0, 20),
    st.sampled_from([2, 16, 40]),
    st.sampled_from(sorted(CONSTRUCTIONS)),
)


@holds_for(WINDOWED, share=4)
def windows_give_what_the_specification_gives(case: Windowed) -> None:
    tensors, options = case.inputs.tensors(), case.inputs.options()
    features = MaclaurinFeatures(
        case.inputs.head_dim, case.num_features, construction=case.construction, seed=0
    )
    wide, exact = [x.double() for x in tensors], []

    def specify() -> None:
        options["implementation"] = "reference"
        exact.append(rmfa_window(*wide, features.double(), case.width, **options))

    if refusal(specify, "range") is not None:
        return
    results: list[Tensor] = []
    options["implementation"] = "eager"
    refused = refusal(
        lambda: results.append(rmfa_window(*tensors, features.float(), case.width, **options)), "range"
    )
    if refused is not None:
        limit = torch.finfo(tensors[0].dtype).max / 1e3
        assert max(case.inputs.magnitudes) > 3 or exact[0].abs().max() > limit, "no overflow was there"
        return
    assert not (results[0].isnan() & exact[0].isfinite()).any(), "NaN where the oracle is finite"
    if case.inputs.dtype == "float64" and max(case.inputs.magnitudes) <= 3:
        size = float(exact[0].abs().max()) if exact[0].numel() else 0.0
        torch.testing.assert_close(results[0], exact[0], rtol=1e-6, atol=1e-6 * size)


SEQUENCES = attentions(ORDINARY, ("float64",), one_batch_dim=True, equal_lengths=True)


@holds_for(st.tuples(SEQUENCES, st.integers(0, 20), st.integers(0, 30)), share=2)
def steps_with_a_window_are_one_causal_call(case: tuple[Attention, int, int]) -> None:
    inputs, width, cut = case
    query, key, value = inputs.tensors()
    options = inputs.options() | {"is_causal": True}
    mask, shared = options["key_mask"], {"enable_gqa": options["enable_gqa"]}
    features = MaclaurinFeatures(inputs.head_dim, 16, seed=0, dtype=torch.float64)
    whole: list[Tensor] = []
    if refusal(lambda: whole.append(rmfa_window(query, key, value, features, width, **options)), "range"):
        return
    (batch,), rows = inputs.batch, []
    sizes = width, batch, inputs.heads, inputs.value_dim
    state = RMFAWindowState.zeros(features, *sizes, dtype=torch.float64)
    for span in (slice(0, cut), slice(cut, None)):
        part = (x[..., span, :] for x in (query, key, value))
        piece = None if mask is None else mask[:, span]
        out, state = rmfa_window_step(*part, features, state, key_mask=piece, **shared)
        rows.append(out)
    right = rmfa_window(query, key, value, features, width, implementation="reference", **options)
    size, lost = (float(x.abs().max()) if x.numel() else 0.0 for x in (right, right - whole[0]))
    if lost > 1e-8 * size:
        return  # large weights of both signs that the floor lifts: two right ways differ in most digits
    torch.testing.assert_close(torch.cat(rows, dim=-2), whole[0], rtol=1e-6, atol=1e-6 * size)


PACKED = st.builds(Call, attentions(ORDINARY, ("float64", "float32")), MAPS, st.none())


@holds_for(st.tuples(PACKED, st.lists(st.integers(0, 40), max_size=5)), share=3)
def packed_sequences_do_not_meet(case: tuple[Call, list[int]]) -> None:
    call, lengths = case
    total = sum(lengths)
    generator = torch.Generator().manual_seed(call.inputs.seed)
    widths = call.inputs.head_dim, call.inputs.head_dim, call.inputs.value_dim
    dtype = getattr(torch, call.inputs.dtype)
    query, key, value = (
        torch.randn(total, call.inputs.heads, width, generator=generator, dtype=dtype) for width in widths
    )
    features, causal = call.features(), call.inputs.is_causal
    ends = torch.tensor([0, *lengths]).cumsum(0)
    results: list[Tensor] = []
    refused = refusal(
        lambda: results.append(rmfa_varlen(query, key, value, features, ends, is_causal=causal)), "range"
    )
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        alone = (x[start:end].transpose(0, 1) for x in (query, key, value))
        expected = expected_rmfa(*alone, features, dtype=dtype, is_causal=causal)
        if refused is None:
            assert_within(results[0][start:end].transpose(0, 1).detach(), expected)
    for wrong in (ends + 1, ends.flip(0) + 1, ends.float() / 2, ends[:0], ends[None], ends.tolist()):
        must_refuse(lambda wrong=wrong: rmfa_varlen(query, key, value, features, wrong), "cu_seqlens")
