"""Exact near, linear far: the eager path against the dense specification in float64, and its two limits."""

import copy

import pytest
import torch
from oracle import Largest, assert_as_good_as_reference, gradients, make_map, poisoned_memory, rows

from schoenbat import SchoenbAt, kernelized_attention, rmfa, rmfa_window
from schoenbat.ops import dispatch, reference, window
from schoenbat.ops.near_and_far import Window
from schoenbat.windowed import RMFAWindowState, rmfa_window_step


def batch(length, groups=1, value_dim=5, dtype=torch.float64):
    query = rows(2, 2 * groups, length, 6, seed=1, dtype=dtype)
    key = rows(2, 2, length, 6, seed=2, dtype=dtype)
    value = rows(2, 2, length, value_dim, seed=4, dtype=dtype) + 3
    return query, key, value


def half_masked(keys):
    mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(5)) > 0.4
    mask[1] = False  # one batch row has no key at all
    return mask


def assert_matches_reference(tensors, features, width, rtol=1e-9, **options):
    given = [x for x in options.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    leaves = [*tensors, *features.parameters(), *given, *options.get("far_maps", ())]
    for leaf in leaves:
        leaf.requires_grad_()
    results = [
        gradients(lambda i=i: rmfa_window(*tensors, features, width, implementation=i, **options), leaves)
        for i in ("reference", "eager")
    ]
    (expected, expected_grads), (got, got_grads) = results
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)
    for a, b in zip(expected_grads, got_grads, strict=True):
        size = max(float(a.abs().max()), 1e-3) if a.numel() else 0.0
        torch.testing.assert_close(b, a, rtol=100 * rtol, atol=100 * rtol * size)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("length", "width"), [(0, 3), (1, 0), (7, 2), (64, 0), (150, 5), (200, 70), (130, 129), (9, 50)]
)
def test_matches_reference(length, width, is_causal, masked):
    features = make_map("unbiased" if length % 2 else "exact-low", trainable=True)
    mask = half_masked(length) if masked else None
    with poisoned_memory():
        assert_matches_reference(batch(length), features, width, key_mask=mask, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_heads", [None, 2])
def test_groups_scales_weights_and_maps_match_reference(is_causal, num_heads):
    assert_matches_reference(
        batch(140, groups=3),
        make_map("unbiased", trainable=True, num_heads=num_heads),
        11,
        key_mask=half_masked(140),
        is_causal=is_causal,
        scale=torch.linspace(0.5, 4.0, 6, dtype=torch.float64),
        far_weight=torch.linspace(0.2, 3.0, 6, dtype=torch.float64),
        far_maps=(rows(6, 6, 6, seed=12), rows(2, 6, 6, seed=13)),
        enable_gqa=True,
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_active_floor_matches_reference(is_causal):
    """Opposed means at a large scale: the floor decides the far denominator, near and far both count."""
    features = make_map("exact-low", trainable=True, scale=4.0)
    shift = rows(1, 1, 1, 6, seed=8)
    query, key, value = batch(100)
    tensors = (query + shift).detach(), (key - shift).detach(), value
    m = features.scale * (tensors[0] * tensors[1].mean(-2, keepdim=True)).sum(-1)
    assert (m < -1).double().mean() > 0.5, "the inputs must exercise the floor"
    assert_matches_reference(tensors, features, 4, rtol=1e-7, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_window_that_holds_every_key_is_softmax(is_causal, size):
    """With logits of ±900 too: the exponentials are taken under the row's largest."""
    query, key, value = batch(90)
    out = rmfa_window(
        size * query, size * key, value, make_map("exact-low"), 90, is_causal=is_causal, scale=1.0
    )
    exact = kernelized_attention(size * query, size * key, value, is_causal=is_causal, scale=1.0)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_near_keys_it_is_feature_attention(is_causal):
    """A width of −1, which only the specification takes; and a far weight beside which near keys vanish."""
    features, (query, key, value) = make_map("unbiased"), batch(40)
    expected = rmfa(query, key, value, features, is_causal=is_causal, implementation="reference")
    grouped = (x[:, :, None] for x in (query, key, value))
    one = torch.zeros(2, 1, 1, 1, dtype=torch.float64)
    scale = torch.full((2, 1, 1, 1), features.scale**0.5, dtype=torch.float64)
    settings = Window(-1, is_causal, 0, one)
    out = window.reference(*grouped, None, features.map(torch.float64), scale, settings)
    torch.testing.assert_close(out[:, :, 0], expected)

    far_only = rmfa_window(query, key, value, features, 2, is_causal=is_causal, far_weight=1e15)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    visible = (distance > 2) if is_causal else distance.abs() > 2
    grouped = (x[:, :, None] for x in (query, key, value))
    feature_map = features.map(torch.float64)
    expected = reference.attend(
        *grouped, visible[None, None, None], *feature_map[:3], scale, feature_map.key_scale
    )
    has_far = visible.any(-1)
    torch.testing.assert_close(far_only[:, :, has_far], expected[:, :, 0, has_far], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_wider_window_is_closer_to_softmax(is_causal):
    """At a scale where features fail, on rows that resemble their neighbours."""
    walk = torch.randn(2, 2, 200, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    walk = torch.nn.functional.normalize(walk.cumsum(-2), dim=-1)
    value, features = rows(2, 2, 200, 5, seed=4), make_map("exact-low", 16, 64, scale=8.0)
    exact = kernelized_attention(walk, walk, value, is_causal=is_causal, scale=8.0)
    errors = [
        float((rmfa_window(walk, walk, value, features, width, is_causal=is_causal) - exact).norm())
        for width in (0, 8, 32, 100, 200)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lower_precision_is_as_good_as_the_reference_in_it(dtype, is_causal, device):
    features = make_map("unbiased", 16, 64, dtype=torch.float32, scale=1.0).to(device)
    inputs = [rows(2, 2, 300, 16, seed=i, dtype=dtype).to(device) for i in range(3)]
    results = {}
    for name, cast in (("eager", dtype), ("reference", dtype), ("exact", torch.float64)):
        tensors = [x.to(cast).requires_grad_() for x in inputs]
        how = "eager" if name == "eager" else "reference"
        results[name] = gradients(
            lambda t=tensors, how=how: rmfa_window(*t, features, 20, is_causal=is_causal, implementation=how),
            tensors,
        )
    assert results["eager"][0].dtype == dtype
    assert_as_good_as_reference(*(results[name][0] for name in ("eager", "reference", "exact")))
    for triple in zip(*(results[name][1] for name in ("eager", "reference", "exact")), strict=True):
        assert_as_good_as_reference(*triple)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_keys_and_extreme_logits_have_finite_gradients(is_causal):
    """Far keys of logit −800 beside near ones of logit 800, and a batch row without any key."""
    key = torch.zeros(2, 1, 70, 6)
    key[..., 0], key[..., ::9, 0] = -20.0, 20.0
    query, value = key.clone() * 2, torch.randn(2, 1, 70, 3)
    mask = torch.tensor([True, False])[:, None].expand(2, 70)
    tensors = [x.requires_grad_() for x in (query, key, value)]
    features = make_map("exact-low", dtype=torch.float32, scale=1.0)
    out = rmfa_window(*tensors, features, 2, key_mask=mask, is_causal=is_causal)
    out.sum().backward()
    assert out[0].isfinite().all()
    assert not out[1].any()
    assert all(x.grad.isfinite().all() for x in tensors)


def test_masked_keys_leave_no_trace():
    features, (query, key, value) = make_map("unbiased"), batch(100)
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[:, 60:] = False
    key[:, :, 60:], value[:, :, 60:] = torch.nan, torch.inf
    padded = rmfa_window(query, key, value, features, 7, key_mask=mask)[:, :, :60]
    truncated = rmfa_window(*(x[:, :, :60] for x in (query, key, value)), features, 7)
    torch.testing.assert_close(padded, truncated)


def test_causal_outputs_do_not_depend_on_the_future():
    features, (query, key, value) = make_map("unbiased"), batch(150)
    out = rmfa_window(query, key, value, features, 9, is_causal=True)
    key[:, :, 100:], value[:, :, 100:] = 7.0, 7.0
    other = rmfa_window(query, key, value, features, 9, is_causal=True)
    assert torch.equal(out[:, :, :100], other[:, :, :100])
    assert not torch.allclose(out[:, :, 100:], other[:, :, 100:])


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_operation_makes_anything_quadratic(is_causal):
    features, sizes = make_map("exact-low", dtype=torch.float32), []
    for length in (4096, 8192):
        tensors = [torch.randn(1, 1, length, 6, requires_grad=True) for _ in range(3)]
        with Largest() as largest:
            rmfa_window(*tensors, features, 16, is_causal=is_causal).sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] <= 2.1 * sizes[0]
    assert sizes[1] < 2**21


@pytest.mark.parametrize("transform", ["jvp", "vmap", "grad"])
def test_function_transforms(transform):
    features, (query, key, value) = make_map("exact-low"), batch(70)
    tangent, step = rows(*query.shape, seed=11), 1e-6

    def call(q):
        return rmfa_window(q, key, value, features, 3, is_causal=True)

    slope = (call(query + step * tangent) - call(query - step * tangent)) / (2 * step)
    if transform == "jvp":
        torch.testing.assert_close(torch.func.jvp(call, (query,), (tangent,))[1], slope, rtol=1e-5, atol=1e-7)
    elif transform == "grad":
        got = torch.func.grad(lambda q: call(q).sum())(query)
        torch.testing.assert_close((got * tangent).sum(), slope.sum(), rtol=1e-5, atol=1e-7)
    else:
        many = torch.stack([query, query.flip(-2)])
        torch.testing.assert_close(torch.vmap(call)(many), torch.stack([call(q) for q in many]))


@pytest.mark.parametrize(
    ("is_causal", "dynamic"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)]
)
def test_compiled(is_causal, dynamic):
    module = SchoenbAt(6, 2, 20, construction="exact-low", window=5, seed=0, dtype=torch.float64)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (90, 150) if dynamic else (90,):
        results = []
        for call in (module, compiled):
            call.zero_grad()
            tensors = [x.clone().requires_grad_() for x in batch(length, value_dim=6)]
            out = call(*tensors, is_causal=is_causal)
            out.square().sum().backward()
            results.append([out, *(x.grad for x in tensors), *(p.grad for p in call.parameters())])
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager, rtol=1e-9, atol=1e-9)


def test_compiled_where_autograd_is_off():
    """No out= that is part of a larger tensor, which no graph can hold."""
    features, tensors = make_map("exact-low"), batch(90)
    compiled = torch.compile(rmfa_window, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(*tensors, features, 5, is_causal=True)
    torch.testing.assert_close(got, rmfa_window(*tensors, features, 5, is_causal=True))


def test_errors_name_the_problem():
    features, (query, key, value) = make_map("exact-low"), batch(10)
    with pytest.raises(ValueError, match="as many queries as keys, got 4 and 10"):
        rmfa_window(query[:, :, :4], key, value, features, 2)
    with pytest.raises(ValueError, match="integer of at least 0, got -1"):
        rmfa_window(query, key, value, features, -1)
    with pytest.raises(ValueError, match="needs the kernel 'exp', this map's is 'inv'"):
        rmfa_window(query, key, value, make_map("exact-low", kernel="inv", scale=0.9), 2)
    with pytest.raises(ValueError, match="far_weight must be positive, got 0"):
        rmfa_window(query, key, value, features, 2, far_weight=0)
    with pytest.raises(ValueError, match=r"far_weight must be positive, got tensor\(\[ 1\., -1\.\]"):
        rmfa_window(query, key, value, features, 2, far_weight=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="far_maps must have shapes"):
        rmfa_window(query, key, value, features, 2, far_maps=(torch.eye(6), torch.eye(6)))
    with pytest.raises(NotImplementedError, match=r"the query is (torch\.float64|on cpu)"):
        rmfa_window(query, key, value, features, 2, implementation="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_state_of_the_default_dtype_takes_tokens_of_any(dtype):
    features, (query, key, value) = make_map("exact-low"), batch(10, dtype=dtype)
    state = RMFAWindowState.zeros(features, 3, batch=2, kv_heads=2, value_dim=5)
    whole, after = rmfa_window_step(query, key, value, features, state)
    assert whole.dtype == after.key.dtype == after.value.dtype == dtype
    expected = rmfa_window(query, key, value, features, 3, is_causal=True)
    torch.testing.assert_close(whole, expected)


def test_an_implementation_by_name_is_that_of_far_keys_too(monkeypatch):
    asked, accumulate = [], dispatch.accumulate

    def watched(*tensors, implementation):
        asked.append(implementation)
        return accumulate(*tensors, implementation=implementation)

    monkeypatch.setattr(dispatch, "accumulate", watched)
    features, tensors = make_map("exact-low", 6, 16), batch(4)
    state = RMFAWindowState.zeros(features, 3, batch=2, kv_heads=2, value_dim=5, dtype=torch.float64)
    rmfa_window_step(*tensors, features, state, implementation="eager")
    assert asked == ["eager"]


def test_a_state_keeps_its_window_and_not_the_prompt():
    features, tensors = make_map("exact-low"), batch(100)
    state = RMFAWindowState.zeros(features, 3, batch=2, kv_heads=2, value_dim=5, dtype=torch.float64)
    _, state = rmfa_window_step(*tensors, features, state)
    for kept in (state.key, state.value, state.mask):
        assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


def test_reordering_by_rows_that_are_not_there_is_an_error_and_changes_nothing():
    features = make_map("exact-low")
    state = RMFAWindowState.zeros(features, 3, batch=2, kv_heads=2, value_dim=5)
    before = state.key
    with pytest.raises(ValueError, match=r"batch rows from 0 to 1, got \[0, 2\]"):
        state.reorder(torch.tensor([0, 2]))
    assert state.key is before


def test_a_state_of_more_precision_than_its_tokens_is_an_error():
    features = make_map("exact-low")
    state = RMFAWindowState.zeros(features, 3, batch=2, kv_heads=2, value_dim=5, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"the state is float64, tokens are torch\.float32"):
        rmfa_window_step(*batch(4, dtype=torch.float32), features, state)


def test_what_is_wrong_with_the_arguments_is_said():
    q, k, v = batch(10)
    features = make_map("exact-low")
    state = RMFAWindowState.zeros(features, 3, 2, 2, 5, dtype=q.dtype)
    for error, message, call in [
        (TypeError, "features must be a MaclaurinFeatures", lambda: rmfa_window(q, k, v, "exp", 3)),
        (ValueError, "is_causal must be True", lambda: rmfa_window(q, k, v, features, 3, is_causal="no")),
        (
            ValueError,
            "far_weight must be finite",
            lambda: rmfa_window(q, k, v, features, 3, far_weight=1e999),
        ),
        (TypeError, "far_weight must be a number", lambda: rmfa_window(q, k, v, features, 3, far_weight="a")),
        (
            ValueError,
            r"far_weight must be a float or .* \(2,\)",
            lambda: rmfa_window(q, k, v, features, 3, far_weight=torch.ones(3)),
        ),
        (
            TypeError,
            "far_maps must be two tensors",
            lambda: rmfa_window(q, k, v, features, 3, far_maps=torch.eye(6)),
        ),
        (ValueError, "width must be", lambda: RMFAWindowState.zeros(features, -1, 2, 2, 5)),
        (
            TypeError,
            "must be an RMFAWindowState, got None",
            lambda: rmfa_window_step(q, k, v, features, None),
        ),
        (
            TypeError,
            "must be an RMFAWindowState, got RMFAState",
            lambda: rmfa_window_step(q, k, v, features, state.far),
        ),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_a_module_refuses_a_state_of_another_width():
    q, k, v = (x.float() for x in batch(10, value_dim=6))
    attention = SchoenbAt(6, 2, 20, window=9, construction="exact-low").eval()
    other = RMFAWindowState.zeros(attention.features, 2, 2, 2, 6)
    with pytest.raises(ValueError, match=r"window=9 .* remembers 2 tokens"):
        attention.step(q, k, v, other)
