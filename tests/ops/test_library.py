"""The custom operators: schema, fake tensors, autograd registration, compilation."""

import pytest
import torch
from oracle import gradients, make_map, rows
from torch._dynamo.testing import CompileCounterWithBackend

from schoenbat import RMFAState, rmfa, rmfa_step
from schoenbat.ops import eager, library
from schoenbat.ops.sums import Sums, key_count


def arguments(construction, masked):
    features = make_map(construction, trainable=True).map(torch.float64)
    query = rows(2, 2, 3, 9, 6, seed=1).requires_grad_()
    key, value = rows(2, 2, 1, 9, 6, seed=2).requires_grad_(), rows(2, 2, 1, 9, 5, seed=3).requires_grad_()
    mask = (torch.arange(9) < 7).view(1, 1, 1, 9, 1).expand(2, 1, 1, 9, 1).contiguous() if masked else None
    scale = torch.full((2, 3, 1, 1), 1.2, dtype=torch.float64, requires_grad=True)
    blocks = features.blocks
    maps = [m.detach().requires_grad_() for m in blocks.maps]
    coefficients = features.coefficients.detach().requires_grad_()
    weight = features.weight.detach().requires_grad_()
    count = key_count(key, mask)
    summary = [s.detach().requires_grad_() for s in eager.summarize(key, value, mask, blocks, 1.4)]
    sums = [s.detach().requires_grad_() for s in Sums(*summary)]
    return {
        "summarize": (key, value, mask, maps, blocks.layout, 1.4),
        "read": (query, summary, count.double(), maps, coefficients, scale, blocks.layout),
        "scan": (
            *(query, key, value, mask, count, sums, maps, weight, coefficients, scale),
            *(blocks.layout, 1.4),
        ),
    }


@pytest.mark.parametrize("operator", ["summarize", "read", "scan"])
@pytest.mark.parametrize("construction", ["exact-low", "paper"])
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck(operator, construction, masked):
    torch.library.opcheck(getattr(library, operator), arguments(construction, masked)[operator])


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled_fullgraph_matches_eager(is_causal):
    features = make_map("unbiased", dtype=torch.float32, trainable=True)
    tensors = [rows(2, 2, 40, 6, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
    mask = torch.arange(40).expand(2, 40) < 30

    def call(query, key, value):
        return rmfa(query, key, value, features, key_mask=mask, is_causal=is_causal)

    compiled = torch.compile(call, fullgraph=True)
    everything = [*tensors, *features.parameters()]
    expected, expected_grads = gradients(lambda: call(*tensors), everything)
    got, got_grads = gradients(lambda: compiled(*tensors), everything)
    torch.testing.assert_close(got, expected)
    for a, b in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_compiled_once_for_every_length():
    features = make_map("exact-low", dtype=torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: rmfa(*x, features), fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for n in (40, 41, 300):
        inputs = [rows(2, 2, n, 6, seed=i, dtype=torch.float32) for i in range(3)]
        torch.testing.assert_close(compiled(*inputs), rmfa(*inputs, features))
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1] > 0


def test_compiled_step():
    features = make_map("exact-low", dtype=torch.float32)
    state = RMFAState.zeros(features, 2, 2, 6)
    inputs = [rows(2, 2, 1, 6, seed=i, dtype=torch.float32) for i in range(3)]
    compiled = torch.compile(lambda s, *x: rmfa_step(*x, features, s), fullgraph=True)
    expected, after = rmfa_step(*inputs, features, state)
    got, got_after = compiled(state, *inputs)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got_after.feature_value, after.feature_value)
    torch.testing.assert_close(got_after.count, after.count)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_is_computed_in_half_precision_under_autocast(is_causal):
    """Autocast rounds the inputs; from there on it is what rounded inputs give outside of it."""
    features = make_map("exact-low", dtype=torch.float32)
    tensors = [rows(2, 2, 40, 6, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]

    def inside():
        with torch.autocast("cpu", torch.bfloat16):
            return rmfa(*tensors, features, is_causal=is_causal)

    def backward_inside():
        out = inside()
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(out.float().sum(), tensors)

    out, grads = gradients(inside, tensors)
    rounded = [x.detach().bfloat16().requires_grad_() for x in tensors]
    expected, expected_grads = gradients(lambda: rmfa(*rounded, features, is_causal=is_causal), rounded)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        assert torch.equal(a, b.float())
    plain = torch.autograd.grad(inside().float().sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(backward_inside(), plain, strict=True))
