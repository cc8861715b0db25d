"""The fused kernels against the float64 specification: in the interpreter, and on a GPU if there is one."""

import pytest
import torch
from oracle import gradients, make_map, poisoned_memory, rows

from schoenbat import RMFAState, rmfa, rmfa_step

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Products in the interpreter are wrong for bfloat16; a GPU must show all three.
DTYPES = [torch.float32, torch.float16]
DTYPES += [pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# One rounding of the features and one of the sums go into every output and gradient.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def relative_error(got, exact):
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-3))


def assert_close_to_specification(features, tensors, scale, **options):
    """Outputs and the gradients of query, key, value and scale."""
    inputs = [x.to(DEVICE).requires_grad_() for x in (*tensors, scale)]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]

    def run(xs, implementation):
        *qkv, s = xs
        return gradients(lambda: rmfa(*qkv, features, scale=s, implementation=implementation, **options), xs)

    with poisoned_memory():
        got, got_grads = run(inputs, "triton")
    exact, exact_grads = run(exact_inputs, "reference")
    assert got.dtype == tensors[0].dtype
    errors = [relative_error(a, b) for a, b in zip([got, *got_grads], [exact, *exact_grads], strict=True)]
    assert max(errors) < TOLERANCE[got.dtype], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
@pytest.mark.parametrize(("queries", "keys"), [(70, 130), (1, 63), (65, 20)])
def test_matches_the_specification(dtype, construction, queries, keys):
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(2, 2, n, 16, seed=i, dtype=dtype) for i, n in enumerate((queries, keys, keys))]
    assert_close_to_specification(features, tensors, torch.tensor([0.7, 2.5]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_masks_groups_and_maps_per_head(dtype, construction):
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE, num_heads=2)
    query = rows(2, 6, 33, 16, seed=1, dtype=dtype)
    key, value = (rows(2, 2, 70, 16, seed=i, dtype=dtype) for i in (2, 3))
    mask = (torch.rand(2, 70, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[1] = False
    scale = torch.linspace(0.5, 3.0, 6)
    assert_close_to_specification(features, [query, key, value], scale, key_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"),
    [(20, 24, 300), (20, 24, 10), (5, 3, 2), pytest.param(128, 80, 256, marks=pytest.mark.gpu)],
)
def test_widths_that_divide_nothing(head_dim, value_dim, num_features):
    """Complete degree 2 with a tail; projected linear features; a map of constants but for one feature."""
    features = make_map("exact-low", head_dim, num_features, dtype=torch.float32, device=DEVICE)
    tensors = [
        rows(1, 2, 40, d, seed=i, dtype=torch.float32) for i, d in enumerate((head_dim, head_dim, value_dim))
    ]
    assert_close_to_specification(features, tensors, torch.tensor([1.0, 1.5]))


def test_one_key_is_its_value_and_no_key_is_zero():
    features = make_map("unbiased", 16, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = (rows(1, 2, n, 16, seed=n, dtype=torch.float32).to(DEVICE) for n in (65, 1, 1))
    out = rmfa(query, key, value, features, implementation="triton")
    torch.testing.assert_close(out, value.expand_as(out))
    nothing = rmfa(query, key[..., :0, :], value[..., :0, :], features, implementation="triton")
    assert torch.equal(nothing, torch.zeros_like(out))
    assert rmfa(query[..., :0, :], key, value, features, implementation="triton").shape == (1, 2, 0, 16)


def test_an_active_floor_has_gradients():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, scale=2.0)
    shift = rows(1, 1, 1, 16, seed=8, dtype=torch.float32)
    query = rows(1, 2, 40, 16, seed=1, dtype=torch.float32) + shift
    key = rows(1, 2, 40, 16, seed=2, dtype=torch.float32) - shift
    value = rows(1, 2, 40, 16, seed=3, dtype=torch.float32)
    assert_close_to_specification(features, [query, key, value], torch.tensor([2.0, 2.0]))


def test_inputs_need_not_be_contiguous():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(2, 30, 2, 16, seed=i, dtype=torch.float32).transpose(1, 2) for i in range(3)]
    assert_close_to_specification(features, tensors, torch.tensor([1.0, 2.0]))


def test_two_runs_are_bit_equal():
    features = make_map("unbiased", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 2, 100, 16, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(3)]
    first, again = (
        gradients(lambda: rmfa(*tensors, features, implementation="triton"), tensors) for _ in range(2)
    )
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


def test_operator_is_well_formed():
    from schoenbat.ops.triton import library
    from schoenbat.ops.triton.plan import make_plan

    feature_map = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE).map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, torch.float32, 16)
    x = [rows(1, 2, 1, 20, 16, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(3)]
    scale = torch.ones(2, 1, 1, 1, device=DEVICE, requires_grad=True)
    arguments = (*x, None, plan.tensors, feature_map.coefficients, scale, plan.flags, 1.2)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(library.attend, arguments, test_utils=checks)


def test_what_it_does_not_do_raises():
    features = make_map("exact-low", 16, 40, dtype=torch.float32)
    x = rows(1, 2, 8, 16, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="causal"):
        rmfa(x, x, x, features, is_causal=True, implementation="triton")
    with pytest.raises(NotImplementedError, match="trainable map"):
        rmfa(x, x, x, make_map("exact-low", 16, 40, trainable=True), implementation="triton")
    with pytest.raises(NotImplementedError, match="float64"):
        rmfa(*(x.double(),) * 3, features, implementation="triton")
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: rmfa(q, x, x, features, implementation="triton").sum())(x)
    with pytest.raises(NotImplementedError, match="decode"):
        rmfa_step(x, x, x, features, RMFAState.zeros(features, 1, 2, 16), implementation="triton")
