"""Nyströmformer against its three softmaxes, written out for each unpadded sequence in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from schoenbat.baselines.nystromformer import Nystromformer


def inputs(n=30, num_queries=None, batch=3, dtype=torch.float64):
    shapes = (num_queries or n, 4), (n, 4), (n, 5)
    return [torch.randn(batch, 2, *shape, dtype=dtype) for shape in shapes]


def segment_means(x, count):
    """Of one sequence ``(H, n, d)``; every token by itself if there are no more than `count`."""
    n = x.shape[-2]
    count = min(count, n)
    bounds = [n * i // count for i in range(count + 1)]
    return torch.stack([x[:, a:b].mean(1) for a, b in itertools.pairwise(bounds)], dim=1)


def inverse_by_steps(matrix, iterations):
    """``Z ← Z (I + R + R² + R³/4)`` with ``R = I − AZ``: the same steps, seen from what is left to do."""
    one_norm, infinity_norm = (torch.linalg.matrix_norm(matrix, order) for order in (1, torch.inf))
    inverse = matrix.mT / (one_norm * infinity_norm)[:, None, None]
    identity = torch.eye(matrix.shape[-2], dtype=matrix.dtype)
    for _ in range(iterations):
        rest = identity - matrix @ inverse
        inverse = inverse @ (identity + rest + rest @ rest + rest @ rest @ rest / 4)
    return inverse


def softmax(query, key):
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)


def written_out(query, key, value, landmarks, iterations=6):
    """One sequence ``(H, n, d)`` without padding."""
    if key.shape[-2] <= landmarks:
        return softmax(query, key) @ value
    queries, keys = segment_means(query, landmarks), segment_means(key, landmarks)
    inverse = inverse_by_steps(softmax(queries, keys), iterations)
    return softmax(query, keys) @ (inverse @ (softmax(queries, key) @ value))


@pytest.mark.parametrize("n", [1, 5, 8, 9, 20, 30, 64])
@pytest.mark.parametrize("iterations", [1, 6])
def test_equals_the_formula(n, iterations):
    tensors = inputs(n)
    output = Nystromformer(4, 2, num_landmarks=8, iterations=iterations)(*tensors)
    expected = [written_out(*x, 8, iterations) for x in zip(*tensors, strict=True)]
    torch.testing.assert_close(output, torch.stack(expected))


@pytest.mark.parametrize(("num_queries", "n"), [(3, 30), (30, 9), (50, 6), (1, 1)])
def test_cross_attention(num_queries, n):
    """Also with fewer queries than landmarks, where the inverse is one of a rectangular matrix."""
    tensors = inputs(n, num_queries=num_queries)
    output = Nystromformer(4, 2, num_landmarks=8)(*tensors)
    torch.testing.assert_close(output, torch.stack([written_out(*x, 8) for x in zip(*tensors, strict=True)]))


@pytest.mark.parametrize("n", [30, 31])
def test_enough_landmarks_give_softmax(n):
    tensors = inputs(n)
    expected = F.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(Nystromformer(4, 2, num_landmarks=31)(*tensors), expected)


def test_tokens_that_are_their_landmarks_give_softmax():
    """Where every stretch repeats one token, a converged pseudo-inverse leaves no error."""
    query, key, value = inputs(10, batch=1)
    repeated = [x.repeat_interleave(4, dim=-2) for x in (2 * query, 2 * key)]
    value = torch.randn(1, 2, 40, 5, dtype=torch.float64)
    output = Nystromformer(4, 2, num_landmarks=10, iterations=40)(*repeated, value)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(*repeated, value), rtol=0, atol=1e-6)


def test_every_matrix_is_inverted_by_itself():
    """A sequence of long rows does not slow the convergence of the others."""
    tensors = inputs()
    together = Nystromformer(4, 2, num_landmarks=8)(*(torch.cat([x, 20 * x]) for x in tensors))
    torch.testing.assert_close(together[:3], Nystromformer(4, 2, num_landmarks=8)(*tensors))


def test_the_convolution_is_added():
    attention = Nystromformer(4, 2, num_landmarks=8, conv_kernel_size=3).double()
    query, key, value = inputs()
    padded = F.pad(value, (0, 0, 1, 1))
    taps = attention.conv.weight.view(1, 2, 3, 1, 1)
    convolved = sum(taps[:, :, i] * padded[:, :, i : i + 30] for i in range(3))
    plain = Nystromformer(4, 2, num_landmarks=8)(query, key, value)
    torch.testing.assert_close(attention(query, key, value), plain + convolved)
    assert attention.bfloat16()(*(x.bfloat16() for x in (query, key, value))).isfinite().all()


def test_the_convolution_is_for_self_attention_only():
    attention = Nystromformer(4, 2, conv_kernel_size=3).double()
    with pytest.raises(ValueError, match="got 7 and 30"):
        attention(*inputs(num_queries=7))
    with pytest.raises(ValueError, match="must be odd"):
        Nystromformer(4, 2, conv_kernel_size=4)


@pytest.mark.parametrize("num_landmarks", [3, 8])
def test_gradients(num_landmarks):
    attention = Nystromformer(4, 2, num_landmarks=num_landmarks)
    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in inputs(7, batch=1)])


def test_nothing_is_random():
    attention, tensors = Nystromformer(4, 2, num_landmarks=8), inputs()
    assert torch.equal(attention.train()(*tensors), attention.eval()(*tensors))
    assert not attention.state_dict()


def test_the_convolution_is_saved():
    first, second = (Nystromformer(4, 2, num_landmarks=8, conv_kernel_size=3).double() for _ in range(2))
    tensors = inputs()
    assert not torch.allclose(first(*tensors), second(*tensors))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(*tensors), second(*tensors))


def test_it_needs_a_landmark():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Nystromformer(4, 2, num_landmarks=0)


def test_agrees_with_nystrom_attention():
    package = pytest.importorskip("nystrom_attention")
    # One sequence and one head: the package starts its inverse from the largest norm of the whole batch.
    layer = package.NystromAttention(
        dim=16, dim_head=16, heads=1, num_landmarks=8, residual=True, residual_conv_kernel=5
    )
    layer = layer.double()
    layer.to_out = torch.nn.Identity()
    attention = Nystromformer(16, 1, num_landmarks=8, conv_kernel_size=5).double()
    attention.conv.load_state_dict(layer.res_conv.state_dict())
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    query, key, value = (y[:, None] for y in layer.to_qkv(4 * x).chunk(3, dim=-1))
    torch.testing.assert_close(attention(query, key, value)[:, 0], layer(4 * x))
