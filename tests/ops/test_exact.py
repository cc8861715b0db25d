"""Exact kernelized attention against SDPA and against the formula written out."""

import pytest
import torch
from oracle import assert_as_good_as_reference, gradients, rows
from torch.nn import functional as F

import schoenbat
from schoenbat import kernelized_attention

KERNELS = ("exp", "inv", "logi", "trigh", "sqrt")


def written_out(query, key, value, kernel, scale, visible):
    """Row by row, in float64."""
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        keys = visible[b, i]
        if keys.any():
            weights = schoenbat.kernel(kernel)(scale * (key[b, h, keys] @ query[b, h, i]))
            out[b, h, i] = weights @ value[b, h, keys] / weights.sum()
    return out


def visible_keys(queries, keys, mask, is_causal):
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if is_causal:
        visible = torch.arange(keys)[None] <= torch.arange(queries)[:, None] + keys - queries
    return visible.expand(2, queries, keys) if mask is None else visible & mask[:, None]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 6), (6, 3), (2, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_formula(kernel, is_causal, lengths, masked):
    queries, keys = lengths
    query, key, value = (
        rows(2, 2, queries, 4, seed=1),
        rows(2, 2, keys, 4, seed=2),
        rows(2, 2, keys, 3, seed=3),
    )
    mask = torch.arange(keys).expand(2, keys) >= torch.tensor([[1], [keys]]) if masked else None
    got = kernelized_attention(query, key, value, kernel, key_mask=mask, is_causal=is_causal, scale=0.8)
    visible = visible_keys(queries, keys, mask, is_causal)
    torch.testing.assert_close(got, written_out(query, key, value, kernel, 0.8, visible))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exp_is_scaled_dot_product_attention(dtype):
    query, key, value = (10 * rows(2, 4, 30, 8, seed=i, dtype=dtype) for i in range(3))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    got = kernelized_attention(query, key, value)
    assert got.dtype == dtype
    assert_as_good_as_reference(got, F.scaled_dot_product_attention(query, key, value), exact)


def test_large_logits_do_not_overflow():
    query, key, value = (100 * rows(1, 1, 20, 8, seed=i, dtype=torch.float32) for i in range(3))
    assert kernelized_attention(query, key, value, scale=1.0).isfinite().all()


@pytest.mark.parametrize("kernel", ["exp", "inv"])
def test_grouped_heads_equal_repeated_heads(kernel):
    query, key, value = rows(2, 6, 5, 4, seed=1), rows(2, 2, 7, 4, seed=2), rows(2, 2, 7, 3, seed=3)
    got = kernelized_attention(query, key, value, kernel, enable_gqa=True)
    repeated = (x.repeat_interleave(3, dim=1) for x in (key, value))
    torch.testing.assert_close(got, kernelized_attention(query, *repeated, kernel))


@pytest.mark.parametrize("kernel", ["exp", "inv"])
def test_row_without_keys_gives_zeros_and_finite_gradients(kernel):
    tensors = [rows(2, 2, 4, 4, seed=i).requires_grad_() for i in range(3)]
    mask = torch.tensor([[True] * 4, [False] * 4])
    out, grads = gradients(lambda: kernelized_attention(*tensors, kernel, key_mask=mask), tensors)
    assert (out[1] == 0).all()
    assert all(g.isfinite().all() and (g[1] == 0).all() for g in grads)


@pytest.mark.parametrize("kernel", ["inv", "logi", "sqrt"])
def test_logits_beyond_the_radius_raise(kernel):
    x = rows(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"radius 1 .*scale"):
        kernelized_attention(x, x, x, kernel, scale=1.5)
    masked = torch.zeros(1, 4, dtype=torch.bool)
    assert (kernelized_attention(x, x, x, kernel, scale=1.5, key_mask=masked) == 0).all()


def test_scale_per_head():
    query, key, value = (rows(2, 3, 5, 4, seed=i) for i in range(3))
    scale = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    got = kernelized_attention(query, key, value, "inv", scale=scale)
    for head, s in enumerate(scale.tolist()):
        one = kernelized_attention(*(x[:, head : head + 1] for x in (query, key, value)), "inv", scale=s)
        torch.testing.assert_close(got[:, head : head + 1], one)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention_on_a_gpu(kernel, is_causal, masked):
    tensors = [rows(2, 4, 130, 64, seed=i, dtype=torch.float32).cuda().requires_grad_() for i in range(3)]
    mask = (torch.arange(130) < torch.tensor([[100], [130]])).cuda() if masked else None
    call = {"key_mask": mask, "is_causal": is_causal, "scale": 0.8}
    got, grads = gradients(lambda: kernelized_attention(*tensors, kernel, **call), tensors)
    double = [x.detach().double().requires_grad_() for x in tensors]
    expected, expected_grads = gradients(lambda: kernelized_attention(*double, kernel, **call), double)
    torch.testing.assert_close(got.double(), expected, rtol=2e-3, atol=2e-3)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-3, atol=5e-3)


def test_the_nan_of_one_row_does_not_hide_another_beyond_the_radius():
    query = torch.ones(2, 1, 3, 4)
    query[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="logit 2 is outside the radius 1"):
        kernelized_attention(query, torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), "inv")


@pytest.mark.parametrize("kernel", ["inv", schoenbat.polynomial(2, 0.0)])
def test_a_row_without_keys_is_zero_whatever_its_logits(kernel):
    """The first query of a causal call with fewer keys sees nothing, whatever its logits are."""
    query = torch.tensor([100.0, 0.1], dtype=torch.float64).view(1, 1, 2, 1).requires_grad_()
    key, value = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    out = kernelized_attention(query, key, value, kernel, is_causal=True)
    assert out.flatten().tolist() == [0.0, 1.0]
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert grad.isfinite().all()


def test_logits_beyond_the_range_are_named_where_there_is_no_radius():
    query, key = torch.full((2, 1, 1, 2, 1), 1e30).unbind()
    with pytest.raises(ValueError, match="beyond the range of"):
        kernelized_attention(query, key, key / 1e30, schoenbat.polynomial(1))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["exp", "inv"])
def test_derivatives_of_all_kinds(kernel, is_causal):
    """Forwards, by transforms, and of second order: an oracle is needed wherever `rmfa` can be called."""
    query, key, value = (0.3 * rows(1, 2, 5, 4, seed=seed) for seed in range(3))
    tangent, step = rows(*query.shape, seed=3), 1e-5
    mask = torch.tensor([[True, True, False, True, True]])

    def call(q):
        return kernelized_attention(q, key, value, kernel, key_mask=mask, is_causal=is_causal)

    slope = (call(query + step * tangent) - call(query - step * tangent)) / (2 * step)
    _, by_transform = torch.func.jvp(call, (query,), (tangent,))
    torch.testing.assert_close(by_transform, slope, rtol=1e-6, atol=1e-9)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, tangent)
        forwards = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
    torch.testing.assert_close(forwards, slope, rtol=1e-6, atol=1e-9)
    gradient = torch.func.grad(lambda q: call(q).square().sum())
    bend = (gradient(query + step * tangent) - gradient(query - step * tangent)) / (2 * step)
    _, second = torch.func.jvp(gradient, (query,), (tangent,))
    torch.testing.assert_close(second, bend, rtol=1e-6, atol=1e-9)
    many = torch.stack([query, query.flip(-2)])
    torch.testing.assert_close(torch.vmap(call)(many), torch.stack([call(q) for q in many]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("keys", [3, 40])
def test_nan_queries_give_nan_rows(dtype, keys):
    """All others stay as they are; a row without keys gives zeros all the same."""
    query, key, value = (rows(2, 2, n, 8, seed=n, dtype=dtype) for n in (5, keys, keys))
    mask = torch.arange(keys).expand(2, keys) < torch.tensor([[keys], [0]])
    expected = kernelized_attention(query, key, value, key_mask=mask)
    query[:, 0, 1, 2] = torch.nan
    got = kernelized_attention(query, key, value, key_mask=mask)
    expected[0, 0, 1] = torch.nan
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert (got[1] == 0).all()
    assert kernelized_attention(query, key, torch.zeros_like(value))[:, 0, 1].isnan().all()
    assert kernelized_attention(query, key, torch.zeros_like(value)).isnan().sum() == 2 * 8


@pytest.mark.parametrize("keys", [3, 40])
def test_logits_of_exp_beyond_the_range_are_named(keys):
    query, key = torch.full((1, 1, 2, 4), 1e30), torch.full((1, 1, keys, 4), -1e30)
    with pytest.raises(ValueError, match="beyond the range of"):
        kernelized_attention(query, key, torch.ones(1, 1, keys, 4))


@pytest.mark.parametrize("kernel", ["exp", "sqrt"])
def test_compiled_for_any_sizes(kernel):
    """Which makes a symbol of a radius, too."""
    compiled = torch.compile(kernelized_attention, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 7):
        query, key, value = (rows(2, 2, length, 8, seed=seed) for seed in range(3))
        expected = kernelized_attention(query, key, value, kernel)
        torch.testing.assert_close(compiled(query, key, value, kernel), expected)
