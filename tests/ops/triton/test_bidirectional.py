"""The fused kernels against the float64 specification: in the interpreter, and on a GPU if there is one."""

import pytest
import torch
from ops.triton.specification import (
    DEVICE,
    DTYPES,
    TOLERANCE,
    assert_a_graph_replays,
    assert_close_to_specification,
    relative_error,
)
from oracle import gradients, make_map, rows

from schoenbat import rmfa
from schoenbat.ops.unit_rows import UnitRows

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
@pytest.mark.parametrize(("queries", "keys"), [(20, 70), (1, 1)])
def test_matches_the_specification(dtype, construction, queries, keys):
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 2, n, 16, seed=i, dtype=dtype) for i, n in enumerate((queries, keys, keys))]
    assert_close_to_specification(features, tensors, torch.tensor([0.7, 2.5]))


@pytest.mark.parametrize(
    ("construction", "head_dim", "value_dim", "num_features"),
    [
        ("unbiased", 64, 64, 200),
        ("unbiased", 100, 120, 80),
        ("exact-low", 64, 64, 256),
        ("exact-low", 60, 40, 250),
        ("exact-low", 128, 128, 256),
    ],
)
def test_forms_of_half_precision(few_programs, construction, head_dim, value_dim, num_features):
    """Wide groups of many degrees, several and one; several groups of pairs at hand.

    Several tiles to a program.
    """
    features = make_map(construction, head_dim, num_features, dtype=torch.float32, device=DEVICE, num_heads=2)
    query = rows(1, 4, 150, head_dim, seed=0, dtype=torch.float16)
    key, value = (rows(1, 2, 150, d, seed=i, dtype=torch.float16) for i, d in ((1, head_dim), (2, value_dim)))
    mask = (torch.rand(1, 150, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "enable_gqa": True, "unit_rows": UnitRows(True, 1e-5)}
    assert_close_to_specification(features, [query, key, value], torch.linspace(0.7, 2.0, 4), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
@pytest.mark.parametrize("length", [1, 63, 500, 1000, 4096, 16384 + 7])
def test_matches_the_specification_on_a_gpu(dtype, construction, length):
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    other = max(1, length // 2)
    tensors = [rows(1, 4, n, 64, seed=i, dtype=dtype) for i, n in enumerate((length, other, other))]
    mask = (torch.rand(1, other, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    mask[:, 0] = True
    scale = torch.linspace(0.5, 2.5, 4)
    assert_close_to_specification(features, tensors, scale, "eager", key_mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"),
    [
        (16, 16, 64),
        (32, 24, 64),
        (32, 48, 128),
        (32, 32, 128),
        (64, 64, 256),
        (128, 128, 256),
        (80, 128, 512),
        (64, 192, 128),
        (256, 128, 300),
        (160, 256, 512),
    ],
)
def test_every_width_on_a_gpu(construction, head_dim, value_dim, num_features):
    features = make_map(construction, head_dim, num_features, dtype=torch.float32, device=DEVICE)
    widths = head_dim, head_dim, value_dim
    tensors = [rows(2, 4, 1000, d, seed=i, dtype=torch.bfloat16) for i, d in enumerate(widths)]
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 2.5, 4), "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_to_one_graph(construction, mode):
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [
        rows(2, 4, 500, 64, seed=i, dtype=torch.bfloat16).to(DEVICE).requires_grad_() for i in range(3)
    ]

    def attend():
        return rmfa(*tensors, features, implementation="triton")

    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    for _ in range(3):  # the third call replays a CUDA graph
        got, got_grads = (x if isinstance(x, list) else x.clone() for x in gradients(compiled, tensors))
    right, right_grads = gradients(attend, tensors)
    for a, b in zip([got, *got_grads], [right, *right_grads], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.bfloat16]


def test_a_trace_of_it_gives_the_same():
    """Also where the map has not been laid out before."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = tuple(rows(1, 1, 9, 16, seed=i, dtype=torch.float32).to(DEVICE) for i in range(3))

    def call(query, key, value):
        return rmfa(query, key, value, features, implementation="triton")

    traced = torch.jit.trace(call, tensors, check_trace=False)
    assert torch.equal(traced(*tensors), call(*tensors))


@pytest.mark.gpu
def test_a_graph_of_it_replays():
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [
        rows(1, 4, 500, 64, seed=i, dtype=torch.bfloat16).to(DEVICE).requires_grad_() for i in range(3)
    ]
    assert_a_graph_replays(lambda: rmfa(*tensors, features), tensors)


@pytest.mark.gpu
def test_auto_takes_the_kernels():
    features = make_map("unbiased", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 2, 300, 64, seed=i, dtype=torch.bfloat16).to(DEVICE) for i in range(3)]
    outputs = [rmfa(*tensors, features, implementation=name) for name in ("auto", "triton", "eager")]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_masks_groups_and_maps_per_head(construction):
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE, num_heads=2)
    query = rows(2, 4, 9, 16, seed=1, dtype=torch.float32)
    key, value = (rows(2, 2, 30, 16, seed=i, dtype=torch.float32) for i in (2, 3))
    mask = (torch.rand(2, 30, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[1] = False
    scale = torch.linspace(0.5, 3.0, 4)
    assert_close_to_specification(features, [query, key, value], scale, key_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize(
    ("centred", "head_dim", "eps"), [(True, 16, 1e-3), (True, 20, 1e-13), (False, 20, 1e-13)]
)
def test_rows_are_normalised_on_the_way(construction, centred, head_dim, eps):
    """Long rows, rows shorter than the least norm, constant rows and rows of zeros."""
    features = make_map(construction, head_dim, 40, dtype=torch.float32, device=DEVICE)
    tensors = [3 * rows(2, 1, 20, head_dim, seed=i, dtype=torch.float32) + 0.5 for i in range(3)]
    for x in tensors[:2]:
        x[..., 3, :], x[..., 5, :] = 0.0, 2.0
        x[..., 7, :] *= 1e-9
    mask = (torch.arange(20) < torch.tensor([[20], [13]])).to(DEVICE)
    options = {"key_mask": mask, "unit_rows": UnitRows(centred, eps)}
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), **options)


def test_what_is_masked_may_be_nan():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 1, 20, 16, seed=i, dtype=torch.float32).to(DEVICE) for i in range(3)]
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    mask[:, 13:] = False
    right = rmfa(tensors[0], *(x[..., :13, :] for x in tensors[1:]), features, implementation="triton")
    for x in tensors[1:]:
        x[..., 13:, :] = torch.nan
    inputs = [x.requires_grad_() for x in tensors]
    call = lambda: rmfa(*inputs, features, key_mask=mask, implementation="triton")  # noqa: E731
    got, grads = gradients(call, inputs)
    torch.testing.assert_close(got, right)
    assert all(grad.isfinite().all() for grad in grads)
    assert not any(grad[..., 13:, :].any() for grad in grads[1:])


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"),
    [
        (20, 24, 300),
        (20, 24, 10),
        (5, 3, 2),
        (16, 16, 17),
        (16, 131, 40),
        (130, 24, 150),
        (32, 16, 128),
        (40, 24, 160),
    ],
)
def test_widths_that_divide_nothing(head_dim, value_dim, num_features):
    """Complete degree 2 with a tail; projected linear features; few; none but identities; values in parts;

    an identity that is spelt out; pairs of a projection in one wide group; pairs in two.
    """
    features = make_map("exact-low", head_dim, num_features, dtype=torch.float32, device=DEVICE)
    widths = head_dim, head_dim, value_dim
    tensors = [rows(1, 1, 20, d, seed=i, dtype=torch.float32) for i, d in enumerate(widths)]
    assert_close_to_specification(features, tensors, torch.tensor([1.5]))


def test_wide_heads_on_a_smaller_gpu(few_programs, smaller_gpu):
    features = make_map("exact-low", 72, 140, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 1, 70, 72, seed=i, dtype=torch.float16) for i in range(3)]
    assert_close_to_specification(features, tensors, torch.tensor([1.5]))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_features", "width", "groups"),
    [
        (torch.float32, 64, 128, 16, 1),
        (torch.float32, 32, 128, 16, 1),
        (torch.float32, 64, 256, 1, 0),
        (torch.bfloat16, 64, 256, 32, 3),
        (torch.bfloat16, 64, 300, 1, 0),
        (torch.bfloat16, 128, 256, 16, 2),
        (torch.bfloat16, 16, 100, 1, 1),
    ],
)
def test_a_projection_is_taken_for_maps_that_are_kept_at_hand(dtype, head_dim, num_features, width, groups):
    """In a loop over groups, gradients come out wrong on a GPU, which the interpreter does not show."""
    from schoenbat.ops.triton.plan import make_plan

    feature_map = make_map("exact-low", head_dim, num_features, dtype=torch.float32).map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, dtype, head_dim, bidirectional=True)
    assert (plan.quadratic, plan.whole) == (width, groups)
    without = feature_map.blocks._replace(identity=False)  # a loop of one trip
    plan = make_plan(without, feature_map.weight[:, head_dim:], dtype, head_dim, bidirectional=True)
    assert (plan.quadratic, plan.whole) == (1, 0)


def test_one_key_is_its_value_and_no_key_is_zero():
    features = make_map("unbiased", 16, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = (rows(1, 2, n, 16, seed=n, dtype=torch.float32).to(DEVICE) for n in (17, 1, 1))
    out = rmfa(query, key, value, features, implementation="triton")
    torch.testing.assert_close(out, value.expand_as(out))
    nothing = rmfa(query, key[..., :0, :], value[..., :0, :], features, implementation="triton")
    assert torch.equal(nothing, torch.zeros_like(out))
    assert rmfa(query[..., :0, :], key, value, features, implementation="triton").shape == (1, 2, 0, 16)


def test_an_infinite_denominator_shows():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = (rows(1, 1, 8, 16, seed=i, dtype=torch.float32).to(DEVICE) for i in range(3))
    if DEVICE == "cpu":  # where looking at the output costs nothing
        with pytest.raises(ValueError, match="beyond the range"):
            rmfa(1e18 * query, 1e3 * key, value, features, implementation="triton")
    else:
        assert rmfa(1e18 * query, 1e3 * key, value, features, implementation="triton").isnan().all()


def test_an_active_floor_has_gradients():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, scale=2.0)
    shift = rows(1, 1, 1, 16, seed=8, dtype=torch.float32)
    query = rows(1, 1, 20, 16, seed=1, dtype=torch.float32) + shift
    key = rows(1, 1, 20, 16, seed=2, dtype=torch.float32) - shift
    value = rows(1, 1, 20, 16, seed=3, dtype=torch.float32)
    assert_close_to_specification(features, [query, key, value], torch.tensor([2.0]))


def test_the_scale_may_be_zero():
    features = make_map("unbiased", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 2, 20, 16, seed=i, dtype=torch.float32) for i in range(3)]
    assert_close_to_specification(features, tensors, torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("length", [300, pytest.param(20_000, marks=pytest.mark.gpu)])
def test_large_values_stay_in_the_range_of_half_precision(length):
    """Sums of so many values of 1,000 would not."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    row = rows(1, 1, 1, 16, dtype=torch.float16)
    value = 1000 * rows(1, 1, length, 16, seed=1, dtype=torch.float16).abs()
    inputs = [x.to(DEVICE).contiguous() for x in (row.expand(1, 1, 100, 16), row.expand(value.shape), value)]
    inputs = [x.requires_grad_() for x in inputs]
    got, grads = gradients(lambda: rmfa(*inputs, features, implementation="triton"), inputs)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    right, right_grads = gradients(lambda: rmfa(*exact_inputs, features), exact_inputs)
    assert relative_error(got, right) < TOLERANCE[torch.float16]
    assert relative_error(grads[2], right_grads[2]) < TOLERANCE[torch.float16]
    assert all(grad.isfinite().all() for grad in grads)


def test_inputs_need_not_be_contiguous():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 20, 2, 16, seed=i, dtype=torch.float32).transpose(1, 2) for i in range(3)]
    assert_close_to_specification(features, tensors, torch.tensor([1.0, 2.0]))


def test_two_runs_are_bit_equal():
    features = make_map("unbiased", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 1, 40, 16, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(3)]
    first, again = (
        gradients(lambda: rmfa(*tensors, features, implementation="triton"), tensors) for _ in range(2)
    )
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


def test_a_changed_map_is_laid_out_again():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    x = rows(1, 1, 5, 16, dtype=torch.float32).to(DEVICE)
    before = rmfa(x, x, x, features, implementation="triton")
    features.resample(7)
    resampled = rmfa(x, x, x, features, implementation="triton")
    torch.testing.assert_close(resampled, rmfa(x, x, x, features, implementation="eager"))
    assert not torch.equal(before, resampled)
    features.quadratic.mul_(1.5)
    scaled = rmfa(x, x, x, features, implementation="triton")
    torch.testing.assert_close(scaled, rmfa(x, x, x, features, implementation="eager"))
    assert not torch.equal(scaled, resampled)


def test_training_after_inference_mode():
    """What is kept from a call without gradients must do for one with them."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    x = rows(1, 1, 5, 16, dtype=torch.float32).to(DEVICE).requires_grad_()
    for implementation in ("eager", "triton"):
        with torch.inference_mode():
            rmfa(x, x, x, features, implementation=implementation)
        rmfa(x, x, x, features, implementation=implementation).sum().backward()
    assert x.grad.isfinite().all()


def test_operator_is_well_formed():
    from schoenbat.ops.triton import library
    from schoenbat.ops.triton.plan import make_plan

    feature_map = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE).map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, torch.float32, 16)
    x = [rows(1, 1, 1, 5, 16, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(3)]
    scale = torch.ones(1, 1, 1, 1, device=DEVICE, requires_grad=True)
    arguments = (*x, None, plan.tensors, [], feature_map.coefficients, scale, plan.flags, 1.2, 2, 1e-13)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(library.attend.operator, arguments, test_utils=checks)


def test_what_it_does_not_do_raises():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    x = rows(1, 2, 8, 16, dtype=torch.float32).to(DEVICE)
    with pytest.raises(NotImplementedError, match="nothing in the batch"):
        rmfa(*(x[:0],) * 3, features, implementation="triton")
    with pytest.raises(NotImplementedError, match="float64"):
        rmfa(*(x.double(),) * 3, features, implementation="triton")
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: rmfa(q, x, x, features, implementation="triton").sum())(x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_gradient_that_is_not_given_counts_as_zero(is_causal):
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 1, 20, 16, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(3)]
    Dropped.apply(rmfa(*tensors, features, is_causal=is_causal, implementation="triton")).sum().backward()
    assert not any(x.grad.any() for x in tensors)
