"""Performer against its features, written out in float64, and against softmax."""

import pytest
import torch
import torch.nn.functional as F
from oracle import gradients

from schoenbat.baselines.performer import Performer


def inputs(n=9, num_queries=None, batch=3, dtype=torch.float64):
    shapes = (num_queries or n, 4), (n, 4), (n, 5)
    return [torch.randn(batch, 2, *shape, dtype=dtype) for shape in shapes]


def written_out(attention, query, key, value, is_causal):
    """Nothing stabilised; sequences without padding."""
    x, y = query / attention.head_dim**0.25, key / attention.head_dim**0.25
    directions = attention.directions.double()
    phi_x, phi_y = (torch.exp(z @ directions.mT - z.square().sum(-1, keepdim=True) / 2) for z in (x, y))
    weights = phi_x @ phi_y.mT
    weights = weights.tril(key.shape[-2] - query.shape[-2]) if is_causal else weights
    return (weights @ value) / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("n", [1, 5, 9, 64, 100, 150])
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_formula(n, is_causal):
    attention, tensors = Performer(4, 2, num_features=10), [x.requires_grad_() for x in inputs(n)]
    got = gradients(lambda: attention(*tensors, is_causal=is_causal), tensors)
    expected = gradients(lambda: written_out(attention, *tensors, is_causal), tensors)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_stabilising_changes_nothing_but_the_range(is_causal):
    """Exponents whose exponentials do not fit into float32, rising along the sequence."""
    attention = Performer(4, 2, num_features=16)
    query, key, value = inputs(150)
    query = 30 * F.normalize(query, dim=-1)
    # Rows that begin long have exponents far below zero; as they shrink, the peak rises a hundredfold.
    key = torch.linspace(40, 1, 150, dtype=torch.float64)[:, None] * F.normalize(key, dim=-1)
    expected = written_out(attention, query, key, value, is_causal)
    torch.testing.assert_close(attention(query, key, value, is_causal=is_causal), expected)
    single = attention(query.float(), key.float(), value.float(), is_causal=is_causal)
    torch.testing.assert_close(single.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_error_against_softmax_falls_like_one_over_the_root_of_the_features(is_causal):
    query, key, value = inputs(32)
    # Long rows have weights of such heavy tails that no affordable D shows the rate.
    query, key = query / 2, key / 2
    softmax = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    def error(num_features):
        outputs = [
            Performer(4, 2, num_features=num_features, seed=seed)(query, key, value, is_causal=is_causal)
            for seed in range(20)
        ]
        return (torch.stack(outputs) - softmax).square().mean().sqrt()

    few, more, many = error(32), error(512), error(8192)
    # Sixteen times the features: a quarter of the error.
    assert 2.5 < few / more < 6.5
    assert 2.5 < more / many < 6.5
    assert many < 0.02 * value.std()


def test_directions_are_normal_and_orthogonal_in_blocks():
    directions = Performer(8, 2, num_features=20).directions.double()
    gram = directions @ directions.mT
    for block in (slice(0, 8), slice(8, 16), slice(16, 20)):
        torch.testing.assert_close(gram[block, block], gram[block, block].diag().diag(), atol=1e-5, rtol=0)
    many = torch.cat([Performer(8, 2, num_features=256, seed=seed).directions for seed in range(40)])
    # E ω = 0, E ω² = 1, E ω⁴ = 3 for each coordinate, within five standard deviations of 81,920 of them.
    assert many.mean().abs() < 5 * (1 / many.numel()) ** 0.5
    assert (many.square().mean() - 1).abs() < 5 * (2 / many.numel()) ** 0.5
    assert (many.pow(4).mean() - 3).abs() < 5 * (96 / many.numel()) ** 0.5


@pytest.mark.parametrize("num_queries", [1, 4, 12])
def test_the_last_query_is_aligned_with_the_last_key(num_queries):
    attention = Performer(4, 2)
    query, key, value = inputs(num_queries=num_queries)
    output = attention(query, key, value, is_causal=True)
    expected = written_out(attention, query, key, value, True).nan_to_num(0.0)
    torch.testing.assert_close(output, expected)


def test_a_query_does_not_see_the_future():
    attention = Performer(4, 2)
    query, key, value = inputs(150)
    before = attention(query, key, value, is_causal=True)
    # Short keys have the highest exponents: they would move a maximum over the whole sequence.
    key[:, :, 100:], value[:, :, 100:] = 1e-3, 1e6
    after = attention(query, key, value, is_causal=True)
    assert torch.equal(before[:, :, :100], after[:, :, :100])


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(is_causal):
    attention = Performer(4, 2, num_features=8)
    tensors = [x.requires_grad_() for x in inputs(4, batch=1)]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, is_causal=is_causal), tensors)


def test_the_directions_are_drawn_from_the_seed_and_saved():
    first, other = Performer(4, 2, seed=0), Performer(4, 2, seed=1)
    tensors = inputs()
    assert torch.equal(first.train()(*tensors), first.eval()(*tensors))
    assert torch.equal(first(*tensors), Performer(4, 2, seed=0)(*tensors))
    assert not torch.allclose(first(*tensors), other(*tensors))
    other.load_state_dict(first.state_dict())
    assert torch.equal(first(*tensors), other(*tensors))
    other.redraw(2)
    assert torch.equal(other(*tensors), Performer(4, 2, seed=2)(*tensors))


def test_it_needs_a_feature():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Performer(4, 2, num_features=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_performer_pytorch(is_causal):
    package = pytest.importorskip("performer_pytorch").performer_pytorch
    attention, (query, key, value) = Performer(4, 2), inputs()
    directions = attention.directions.double()
    # The package adds 1e-4 to every feature; here nothing is added.
    features = [
        package.softmax_kernel(x, projection_matrix=directions, is_query=i == 0, eps=0.0)
        for i, x in enumerate((query, key))
    ]
    sums = package.causal_linear_attention_noncuda if is_causal else package.linear_attention
    options = {"eps": 0.0} if is_causal else {}
    torch.testing.assert_close(
        attention(query, key, value, is_causal=is_causal), sums(*features, value, **options)
    )
