"""Skyformer against its kernels, written out for each unpadded sequence in float64."""

import pytest
import torch
from oracle import gradients

from schoenbat.baselines.skyformer import Skyformer


def inputs(n=30, num_queries=None, batch=3, dtype=torch.float64):
    shapes = (num_queries or n, 4), (n, 4), (n, 5)
    return [torch.randn(batch, 2, *shape, dtype=dtype) for shape in shapes]


def gaussian(x, y):
    squares = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)
    return torch.exp(-squares / (2 * x.shape[-1] ** 0.5))


def chosen(x, offsets):
    """One token from each stretch of a sequence ``(H, n, d)``; all of a short one."""
    n, count = x.shape[-2], min(x.shape[-2], len(offsets))
    bounds = [n * i // count for i in range(count + 1)]
    places = [a + int((b - a) * u) for a, b, u in zip(bounds, bounds[1:], offsets.tolist(), strict=False)]
    return x[:, places]


def inverse_by_steps(matrix, iterations):
    """``Z ← Z (I + R + R² + R³/4)`` with ``R = I − AZ``, of the matrix scaled by its row sums."""
    root = matrix.sum(-1).sqrt().diag_embed()
    scaled = root.inverse() @ matrix @ root.inverse()
    inverse = identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    for _ in range(iterations):
        rest = identity - scaled @ inverse
        inverse = inverse @ (identity + rest + rest @ rest + rest @ rest @ rest / 4)
    return root.inverse() @ inverse @ root.inverse()


def written_out(attention, query, key, value):
    """One sequence ``(H, n, d)`` without padding."""
    landmarks = [chosen(x, u) for x, u in zip((query, key), attention.offsets, strict=True)]
    landmarks = torch.cat(landmarks, dim=-2)
    identity = torch.eye(landmarks.shape[-2], dtype=query.dtype)
    between = gaussian(landmarks, landmarks) + attention.regularization * identity
    inverse = inverse_by_steps(between, attention.iterations)
    return gaussian(query, landmarks) @ inverse @ gaussian(landmarks, key) @ value


@pytest.mark.parametrize("n", [1, 5, 8, 9, 20, 30, 64])
@pytest.mark.parametrize("iterations", [1, 6])
def test_equals_the_formula(n, iterations):
    attention = Skyformer(4, 2, num_landmarks=8, iterations=iterations, seed=3).eval()
    tensors = [x.requires_grad_() for x in inputs(n)]
    rows = [written_out(attention, *x) for x in zip(*tensors, strict=True)]
    got, expected = (
        gradients(call, tensors) for call in (lambda: attention(*tensors), lambda: torch.stack(rows))
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("num_queries", "n"), [(3, 30), (30, 3), (1, 1)])
def test_cross_attention(num_queries, n):
    attention, tensors = Skyformer(4, 2, num_landmarks=8).eval(), inputs(n, num_queries=num_queries)
    expected = [written_out(attention, *x) for x in zip(*tensors, strict=True)]
    torch.testing.assert_close(attention(*tensors), torch.stack(expected))


def test_all_tokens_as_landmarks_give_gaussian_kernel_attention():
    query, key, value = inputs()
    exact = gaussian(query, key) @ value
    attention = Skyformer(4, 2, num_landmarks=30, iterations=40, regularization=1e-6)
    torch.testing.assert_close(attention(query, key, value), exact, rtol=0, atol=1e-4)
    # Six steps and the default γ leave out what is small in the spectrum.
    few_steps = Skyformer(4, 2, num_landmarks=30)(query, key, value)
    assert (few_steps - exact).norm() < 0.1 * exact.norm()


def test_the_error_falls_with_the_landmarks():
    query, key, value = inputs(200)
    exact = gaussian(query, key) @ value

    def error(num_landmarks):
        attention = Skyformer(4, 2, num_landmarks=num_landmarks, iterations=12, regularization=1e-3).eval()
        return float((attention(query, key, value) - exact).norm() / exact.norm())

    errors = [error(m) for m in (4, 16, 64)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_rows_are_not_divided_by_their_sum():
    """Twice the same keys and values: twice the output."""
    query, key, value = inputs(10, batch=1)
    attention = Skyformer(4, 2, num_landmarks=20, iterations=40, regularization=1e-6)
    twice = attention(query, torch.cat([key, key], dim=-2), torch.cat([value, value], dim=-2))
    torch.testing.assert_close(twice, 2 * attention(query, key, value), rtol=0, atol=1e-4)


def test_landmarks_are_fixed_in_eval_and_drawn_anew_in_training():
    attention, tensors = Skyformer(4, 2, num_landmarks=8), inputs()
    attention.train()
    assert not torch.allclose(attention(*tensors), attention(*tensors))
    attention.eval()
    assert torch.equal(attention(*tensors), attention(*tensors))
    assert torch.equal(attention(*tensors), Skyformer(4, 2, num_landmarks=8).eval()(*tensors))


def test_the_choice_is_drawn_from_the_seed_and_saved():
    first, other = (Skyformer(4, 2, num_landmarks=8, seed=seed).eval() for seed in (0, 1))
    tensors = inputs()
    assert not torch.allclose(first(*tensors), other(*tensors))
    other.load_state_dict(first.state_dict())
    assert torch.equal(first(*tensors), other(*tensors))


@pytest.mark.parametrize("num_landmarks", [3, 8])
def test_gradients(num_landmarks):
    attention = Skyformer(4, 2, num_landmarks=num_landmarks).eval()
    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in inputs(7, batch=1)])


def test_options_are_checked():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Skyformer(4, 2, num_landmarks=0)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        Skyformer(4, 2, regularization=0.0)
