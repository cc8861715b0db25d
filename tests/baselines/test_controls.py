"""The controls: plain averaging, and no mixing at all."""

import pytest
import torch

from schoenbat.baselines import Mean, NoMixing

KEY_MASK = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)


def inputs(num_queries=6, heads=2, kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, num_queries, 4), (kv_heads, 6, 4), (kv_heads, 6, 4)
    return [torch.randn(2, *shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("num_queries", [1, 4, 6, 9])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_mask", [None, KEY_MASK])
def test_mean_averages_what_each_query_sees(num_queries, is_causal, key_mask):
    query, key, value = inputs(num_queries)
    output = Mean(4, 2)(query, key, value, key_mask=key_mask, is_causal=is_causal)
    assert output.shape == (2, 2, num_queries, 4)
    for row in range(2):
        for i in range(num_queries):
            last = i + 6 - num_queries if is_causal else 5
            seen = [j for j in range(last + 1) if key_mask is None or key_mask[row, j]]
            expected = value[row, :, seen].mean(1) if seen else torch.zeros(2, 4, dtype=torch.float64)
            torch.testing.assert_close(output[row, :, i], expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_mean_keeps_what_is_masked_out_of_sums_and_gradients(is_causal):
    query, key, value = inputs()
    value[0, :, 2] = torch.nan
    value.requires_grad_()
    output = Mean(4, 2)(query, key, value, key_mask=KEY_MASK, is_causal=is_causal)
    output.sum().backward()
    assert output.isfinite().all()
    assert torch.equal(value.grad[0, :, 2], torch.zeros(2, 4, dtype=torch.float64))


def test_mean_of_many_16_bit_values_keeps_them_all():
    value = torch.ones(1, 1, 4096, 1, dtype=torch.bfloat16)
    output = Mean(1, 1)(value, value, value, is_causal=True)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, value)


def test_no_mixing_returns_the_values():
    query, key, value = inputs()
    assert torch.equal(NoMixing(4, 2)(query, key, value, is_causal=True), value)
    masked = NoMixing(4, 2)(query, key, value, key_mask=KEY_MASK)
    assert torch.equal(masked, value * KEY_MASK[:, None, :, None])


def test_no_mixing_is_for_self_attention_only():
    with pytest.raises(ValueError, match="as many queries as keys, got 4 and 6"):
        NoMixing(4, 2)(*inputs(num_queries=4))


@pytest.mark.parametrize("control", [Mean, NoMixing])
def test_query_heads_share_value_heads(control):
    query, key, value = inputs(heads=4, kv_heads=2)
    shared = control(4, 4)(query, key, value, enable_gqa=True)
    assert shared.shape == query.shape
    repeated = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    torch.testing.assert_close(shared, control(4, 4)(query, *repeated))
