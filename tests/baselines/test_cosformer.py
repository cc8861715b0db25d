"""cosFormer against its weights, written out for each unpadded sequence in float64."""

import math

import pytest
import torch
from oracle import Largest

from schoenbat.baselines.cosformer import CosFormer


def inputs(n=9, num_queries=None, batch=3, dtype=torch.float64):
    shapes = (num_queries or n, 4), (n, 4), (n, 5)
    return [torch.randn(batch, 2, *shape, dtype=dtype) for shape in shapes]


def masks(n):
    """With holes, padded on the left, padded on the right."""
    place = torch.arange(n)
    return torch.stack([place % 3 != 1, place >= n // 3, place < (n + 1) // 2])


def written_out(query, key, value, is_causal):
    """One sequence ``(H, n, d)`` without padding."""
    n = key.shape[-2]
    place = torch.arange(n, dtype=torch.float64)
    weights = (query.relu() @ key.relu().mT) * torch.cos(math.pi * (place[:, None] - place) / (2 * n))
    weights = weights.tril() if is_causal else weights
    total = weights.sum(-1, keepdim=True)
    return weights @ value / torch.where(total > 0, total, 1.0)


@pytest.mark.parametrize("n", [1, 9, 64, 150])
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_formula(n, is_causal):
    tensors = inputs(n)
    output = CosFormer(4, 2)(*tensors, is_causal=is_causal)
    expected = torch.stack([written_out(*x, is_causal) for x in zip(*tensors, strict=True)])
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("n", [9, 150])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_is_truncated_in_outputs_and_gradients(n, is_causal):
    """Positions and the length are those of the real tokens; what is masked may be NaN."""
    mask = masks(n)
    padded = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs(n)]
    padded = [x.requires_grad_() for x in padded]
    output = CosFormer(4, 2)(*padded, key_mask=mask, query_mask=mask, is_causal=is_causal)
    output.transpose(1, 2)[mask].square().sum().backward()
    for row, real in enumerate(mask):
        short = [x.detach()[row][:, real].requires_grad_() for x in padded]
        expected = written_out(*short, is_causal)
        torch.testing.assert_close(output[row][:, real], expected)
        expected.square().sum().backward()
        for x, y in zip(padded, short, strict=True):
            torch.testing.assert_close(x.grad[row][:, real], y.grad)
            assert not x.grad[row][:, ~real].any()


@pytest.mark.parametrize("num_queries", [1, 4, 8])
def test_fewer_queries_are_the_last_ones(num_queries):
    query, key, value = inputs()
    whole = CosFormer(4, 2)(query, key, value, is_causal=True)
    some = CosFormer(4, 2)(query[:, :, -num_queries:], key, value, is_causal=True)
    torch.testing.assert_close(some, whole[:, :, -num_queries:])


def test_queries_before_the_first_key_see_nothing():
    query, key, value = inputs(num_queries=12)
    output = CosFormer(4, 2)(query, key, value, is_causal=True)
    assert not output[:, :, :3].any()
    torch.testing.assert_close(output[:, :, 3:], CosFormer(4, 2)(query[:, :, 3:], key, value, is_causal=True))


def test_cross_attention_never_weighs_negatively():
    """Each output lies between the smallest and the largest value, whatever the two lengths."""
    for num_queries in (1, 40):
        query, key, value = inputs(num_queries=num_queries)
        output = CosFormer(4, 2)(query, key, value)
        assert (output <= value.amax(-2, keepdim=True) + 1e-12).all()
        assert (output >= value.amin(-2, keepdim=True).clamp(max=0) - 1e-12).all()


def test_a_query_does_not_see_the_future():
    query, key, value = inputs(150)
    before = CosFormer(4, 2)(query, key, value, is_causal=True)
    key[:, :, 100:], value[:, :, 100:] = torch.randn_like(key[:, :, 100:]), 1e6
    after = CosFormer(4, 2)(query, key, value, is_causal=True)
    assert torch.equal(before[:, :, :100], after[:, :, :100])


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_a_weight_give_zeros_and_finite_gradients(is_causal):
    query, key, value = inputs()
    query[1, :, 4] = -1.0
    key_mask = torch.tensor([True, True, False])[:, None].expand(3, 9)
    tensors = [x.requires_grad_() for x in (query, key, value)]
    output = CosFormer(4, 2)(*tensors, key_mask=key_mask, is_causal=is_causal)
    assert not output[2].any()
    assert not output[1, :, 4].any()
    assert output[0].any()
    output.square().sum().backward()
    for x in tensors:
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(is_causal):
    tensors = [x.requires_grad_() for x in inputs(4, batch=1)]
    attention = CosFormer(4, 2)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, is_causal=is_causal), tensors)


@pytest.mark.parametrize("is_causal", [False, True])
def test_16_bits_lose_only_the_rounding_of_inputs_and_output(is_causal):
    tensors = [x.bfloat16() for x in inputs(500)]
    output = CosFormer(4, 2)(*tensors, is_causal=is_causal)
    assert output.dtype == torch.bfloat16
    exact = CosFormer(4, 2)(*(x.double() for x in tensors), is_causal=is_causal)
    torch.testing.assert_close(output.double(), exact, rtol=2**-8, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(CosFormer(4, 2)(*(x.float() for x in tensors), is_causal=is_causal), output)


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiles_in_one_graph(is_causal):
    torch._dynamo.reset()  # every baseline is compiled through the same forward, and variants are limited
    attention, tensors, mask = CosFormer(4, 2), inputs(70), masks(70)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    expected = attention(*tensors, key_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(compiled(*tensors, key_mask=mask, is_causal=is_causal), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sequences(is_causal):
    query, key, value = inputs()
    output = CosFormer(4, 2)(query, key[:, :, :0], value[:, :, :0], is_causal=is_causal)
    assert torch.equal(output, torch.zeros(3, 2, 9, 5, dtype=torch.float64))
    assert CosFormer(4, 2)(query[:, :, :0], key, value, is_causal=is_causal).shape == (3, 2, 0, 5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_is_linear(is_causal):
    tensors = [torch.randn(1, 1, 4096, 32, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        CosFormer(32, 1)(*tensors, is_causal=is_causal).sum().backward()
    assert largest.numel <= 4096 * 64
