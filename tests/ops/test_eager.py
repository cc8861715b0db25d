"""The eager path against the specification in float64: outputs and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    assert_as_good_as_reference,
    assert_matches_reference,
    gradients,
    make_map,
    poisoned_memory,
    rows,
)

from schoenbat import MaclaurinFeatures, rmfa
from schoenbat.ops import eager_causal

CONSTRUCTIONS = ("exact-low", "unbiased", "paper")


def batch(groups=1, queries=7, keys=7, value_dim=5, dtype=torch.float64):
    query = rows(2, 2 * groups, queries, 6, seed=1, dtype=dtype)
    key = rows(2, 2, keys, 6, seed=2, dtype=dtype)
    value = rows(2, 2, keys, value_dim, seed=4, dtype=dtype) + 3
    return query, key, value


def half_masked(keys):
    mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(5)) > 0.4
    mask[1] = False  # one batch row has no key at all
    return mask


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(7, 7), (300, 140), (5, 200), (1, 0), (0, 3), (129, 129)])
@pytest.mark.parametrize("masked", [False, True])
def test_matches_reference(construction, is_causal, lengths, masked):
    features = make_map(construction, trainable=True)
    query, key, value = batch(1, *lengths)
    mask = half_masked(lengths[1]) if masked else None
    with poisoned_memory():
        assert_matches_reference(query, key, value, features, key_mask=mask, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "eager"])
def test_without_queries_keys_of_infinite_features_have_no_gradient(is_causal, implementation):
    query, key, value = (torch.full((1, 2, n, 1), 1e30, requires_grad=True) for n in (0, 3, 3))
    features = MaclaurinFeatures(1, 16, "inv", scale=0.9, construction="unbiased", seed=0)
    out = rmfa(query, key, value, features, is_causal=is_causal, implementation=implementation)
    assert out.shape == (1, 2, 0, 1)
    for grad in torch.autograd.grad(out.sum(), [key, value]):
        assert not grad.any()


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_heads", [None, 2])
def test_groups_maps_per_head_and_scales_match_reference(construction, is_causal, num_heads):
    features = make_map(construction, trainable=True, num_heads=num_heads)
    query, key, value = batch(groups=3, queries=140, keys=150)
    scale = torch.linspace(0.5, 4.0, 6, dtype=torch.float64)
    assert_matches_reference(
        query,
        key,
        value,
        features,
        key_mask=half_masked(150),
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
    )


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_chunks_one_by_one_and_several_at_once(monkeypatch, at_once, masked):
    """Of 700 rows: five whole chunks, and a part of one."""
    chunk, formed = eager_causal._CHUNK, eager_causal._FORMED
    monkeypatch.setattr(eager_causal, "rows_at_once", lambda x: at_once * formed * chunk)
    assert chunk == 128
    features = make_map("exact-low", trainable=True, num_heads=2)
    query, key, value = batch(2, 700, 700)
    mask = half_masked(700) if masked else None
    scale = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
    with poisoned_memory():
        assert_matches_reference(
            query, key, value, features, key_mask=mask, is_causal=True, scale=scale, enable_gqa=True
        )


@pytest.mark.parametrize("is_causal", [False, True])
def test_active_floor_matches_reference(is_causal):
    """Opposed means at a large scale: the floor decides most denominators, and has gradients of its own."""
    features = make_map("exact-low", trainable=True, scale=4.0)
    shift = rows(1, 1, 1, 6, seed=8)
    query, key = rows(2, 2, 50, 6, seed=1) + shift, rows(2, 2, 50, 6, seed=2) - shift
    value = rows(2, 2, 50, 5, seed=4)
    feature_map = features.map(torch.float64)
    m = features.scale * (query * key.mean(-2, keepdim=True)).sum(-1)
    assert (m < -1).float().mean() > 0.5, "the inputs must exercise the floor"
    assert feature_map.coefficients[0, 0] > 0
    assert_matches_reference(query, key, value, features, rtol=1e-7, is_causal=is_causal)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    construction=st.sampled_from(CONSTRUCTIONS),
    head_dim=st.integers(2, 9),  # in one dimension unit rows are ±1, and denominators equal to their floor
    num_features=st.integers(2, 70),
    value_dim=st.integers(1, 4),
    queries=st.integers(0, 150),
    keys=st.integers(0, 150),
    is_causal=st.booleans(),
    lead=st.lists(st.integers(1, 2), max_size=3),
)
def test_any_shape_matches_reference(
    construction, head_dim, num_features, value_dim, queries, keys, is_causal, lead
):
    features = make_map(construction, head_dim, num_features, trainable=True, scale=0.7)
    query, key = rows(*lead, queries, head_dim, seed=1), rows(*lead, keys, head_dim, seed=2)
    value = rows(*lead, keys, value_dim, seed=3)
    assert_matches_reference(query, key, value, features, rtol=1e-7, is_causal=is_causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_lower_precision_is_as_good_as_the_reference_in_it(dtype, is_causal, construction):
    features = make_map(construction, 16, 64, dtype=torch.float32, scale=1.0)
    inputs = [rows(2, 2, 300, 16, seed=i, dtype=dtype) for i in range(3)]
    results = {}
    for name, cast in (("eager", dtype), ("reference", dtype), ("exact", torch.float64)):
        tensors = [x.to(cast).requires_grad_() for x in inputs]
        how = "eager" if name == "eager" else "reference"
        results[name] = gradients(
            lambda t=tensors, how=how: rmfa(*t, features, is_causal=is_causal, implementation=how), tensors
        )
    assert results["eager"][0].dtype == dtype
    assert_as_good_as_reference(*(results[name][0] for name in ("eager", "reference", "exact")))
    for triple in zip(*(results[name][1] for name in ("eager", "reference", "exact")), strict=True):
        assert_as_good_as_reference(*triple)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradcheck(is_causal):
    features = make_map("unbiased", 4, 12, trainable=True)
    tensors = [x.requires_grad_() for x in (rows(1, 2, 5, 4, seed=i) for i in range(3))]
    scale = torch.tensor([1.5, 2.5], dtype=torch.float64, requires_grad=True)
    parameters = list(features.parameters())

    def call(query, key, value, scale, *_):
        return rmfa(query, key, value, features, scale=scale, is_causal=is_causal)

    assert torch.autograd.gradcheck(call, (*tensors, scale, *parameters), fast_mode=True)


def test_a_second_derivative_raises():
    query, key, value = (x.requires_grad_() for x in batch())
    (grad,) = torch.autograd.grad(
        rmfa(query, key, value, make_map("exact-low")).sum(), query, create_graph=True
    )
    with pytest.raises(RuntimeError, match="eager_read_backward"):
        grad.sum().backward()


def test_the_first_causal_row_is_its_value_however_low_its_floor():
    """In float32 the floor may be a millionth of what the features give."""
    features = MaclaurinFeatures(8, 32, construction="unbiased", scale=8.0, seed=0)
    query, value = rows(50, 2, 70, 8).float(), rows(50, 2, 70, 8, seed=1).float()
    query = torch.nn.functional.normalize(query, dim=-1)
    out = rmfa(query, -query, value, features, is_causal=True)
    torch.testing.assert_close(out[:, :, 0], value[:, :, 0])


def test_large_mean_value_costs_no_precision():
    """The sums are centred, so a constant added to the values comes out as it went in."""
    features = make_map("exact-low", dtype=torch.float32)
    query, key, value = batch(dtype=torch.float32)
    shifted = rmfa(query, key, value + 1000, features) - 1000
    assert (shifted - rmfa(query, key, value, features)).abs().max() < 4 * 1000 * torch.finfo(
        torch.float32
    ).eps


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("transform", ["jvp", "vmap", "grad"])
def test_function_transforms(transform, is_causal):
    features = make_map("exact-low")
    query, key, value = batch()
    tangent = rows(*query.shape, seed=11)

    def call(q):
        return rmfa(q, key, value, features, is_causal=is_causal)

    step = 1e-6
    slope = (call(query + step * tangent) - call(query - step * tangent)) / (2 * step)
    if transform == "jvp":
        _, got = torch.func.jvp(call, (query,), (tangent,))
        torch.testing.assert_close(got, slope, rtol=1e-5, atol=1e-7)
    elif transform == "grad":
        got = torch.func.grad(lambda q: call(q).sum())(query)
        torch.testing.assert_close((got * tangent).sum(), slope.sum(), rtol=1e-5, atol=1e-7)
    else:
        many = torch.stack([query, query.flip(-2)])
        torch.testing.assert_close(torch.vmap(call)(many), torch.stack([call(q) for q in many]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_function_transforms_where_autograd_is_off(is_causal):
    """What is written with out= there has no batched and no forward-mode form."""
    features = make_map("exact-low")
    query, key, value = batch()
    many, tangent = torch.stack([query, query.flip(-2)]), rows(*query.shape, seed=11)

    def call(q):
        return rmfa(q, key, value, features, is_causal=is_causal)

    expected = torch.stack([call(q) for q in many]), torch.func.jvp(call, (query,), (tangent,))[1]
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(call)(many), expected[0])
        torch.testing.assert_close(torch.func.jvp(call, (query,), (tangent,))[1], expected[1])


def test_forward_mode_is_not_silently_zero():
    features = make_map("exact-low")
    query, key, value = batch()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, rows(*query.shape, seed=11))
        out = torch.autograd.forward_ad.unpack_dual(rmfa(dual, key, value, features))
    assert out.tangent is not None
    assert out.tangent.abs().max() > 0


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("degree", [0, 1, 2])
def test_a_gain_of_zero_has_finite_gradients(is_causal, degree):
    """Equal rows, so that the denominator is positive where the constant, and its floor, are gone."""
    features = make_map("exact-low", trainable=True)
    with torch.no_grad():
        features.gains[:, degree] = 0
    x = rows(1, 1, 1, 6).expand(1, 1, 9, 6)
    (grad,) = torch.autograd.grad(
        rmfa(x, x, rows(1, 1, 9, 5), features, is_causal=is_causal).sum(), features.gains
    )
    assert grad.isfinite().all()


def test_an_infinite_denominator_is_not_taken_for_a_large_one():
    """Its quotient would be 0, and the output v̄, wherever the numerator still fits the dtype."""
    query, key, value = (
        torch.full((1, 1, 1, 1), 1e10),
        torch.full((1, 1, 9, 1), 1e28),
        torch.randn(1, 1, 9, 1),
    )
    value = 1e-3 * value
    key[..., :4, :] *= 0.9
    for is_causal in (False, True):
        with pytest.raises(ValueError, match="beyond the range"):
            rmfa(query, key, value, MaclaurinFeatures(1, 2, seed=0), is_causal=is_causal, scale=1.0)
