"""cosFormer against its weights, written out for each unpadded sequence in float64."""

import math

import pytest
import torch
from oracle import gradients

from schoenbat.baselines.cosformer import CosFormer


def inputs(n=9, num_queries=None, batch=3, dtype=torch.float64):
    shapes = (num_queries or n, 4), (n, 4), (n, 5)
    return [torch.randn(batch, 2, *shape, dtype=dtype) for shape in shapes]


def written_out(query, key, value, is_causal):
    """One sequence ``(H, n, d)`` without padding."""
    n = key.shape[-2]
    place = torch.arange(n, dtype=torch.float64)
    weights = (query.relu() @ key.relu().mT) * torch.cos(math.pi * (place[:, None] - place) / (2 * n))
    weights = weights.tril() if is_causal else weights
    total = weights.sum(-1, keepdim=True)
    return weights @ value / torch.where(total > 0, total, 1.0)


@pytest.mark.parametrize("n", [1, 5, 9, 64, 100, 150])
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_formula(n, is_causal):
    tensors = [x.requires_grad_() for x in inputs(n)]
    got = gradients(lambda: CosFormer(4, 2)(*tensors, is_causal=is_causal), tensors)
    rows = [written_out(*x, is_causal) for x in zip(*tensors, strict=True)]
    torch.testing.assert_close(got, gradients(lambda: torch.stack(rows), tensors))


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
