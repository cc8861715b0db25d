"""Softmax attention against the formula, written out in float64."""

import pytest
import torch

from schoenbat.baselines import Softmax


def written_out(query, key, value, visible):
    logits = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ value


def inputs(num_queries=6, num_keys=6, heads=2, kv_heads=2, value_dim=5):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, num_queries, 4), (kv_heads, num_keys, 4), (kv_heads, num_keys, value_dim)
    return [torch.randn(3, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("num_queries", [1, 4, 6, 9])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_formula(num_queries, is_causal, masked):
    query, key, value = inputs(num_queries)
    key_mask = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    visible = torch.ones(3, 1, num_queries, 6, dtype=torch.bool)
    if is_causal:  # the last query sees the last key
        positions = torch.arange(num_queries)[:, None] + 6 - num_queries
        visible = visible & (torch.arange(6) <= positions)
    if masked:
        visible = visible & key_mask[:, None, None]
    output = Softmax(4, 2)(query, key, value, key_mask=key_mask if masked else None, is_causal=is_causal)
    torch.testing.assert_close(output, written_out(query, key, value, visible))


def test_rows_without_a_key_have_finite_gradients():
    tensors = [x.requires_grad_() for x in inputs()]
    key_mask = torch.zeros(3, 6, dtype=torch.bool)
    key_mask[0, 3:] = True
    output = Softmax(4, 2)(*tensors, key_mask=key_mask, is_causal=True)
    assert torch.equal(output[0, :, :3], torch.zeros_like(output[0, :, :3]))
    assert output[0, :, 3:].abs().min() > 0
    output.square().sum().backward()
    for x in tensors:
        assert x.grad.isfinite().all()
        assert torch.equal(x.grad[1:], torch.zeros_like(x.grad[1:]))


def test_padded_is_truncated():
    query, key, value = inputs()
    key_mask = torch.arange(6).expand(3, 6) < 4
    padded = Softmax(4, 2)(query, key, value, key_mask=key_mask)
    torch.testing.assert_close(padded, Softmax(4, 2)(query, key[:, :, :4], value[:, :, :4]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_query_heads_share_key_heads(is_causal):
    query, key, value = inputs(heads=4, kv_heads=2)
    shared = Softmax(4, 4)(query, key, value, is_causal=is_causal, enable_gqa=True)
    repeated = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    torch.testing.assert_close(shared, Softmax(4, 4)(query, *repeated, is_causal=is_causal))
