"""Exact near, linear far by fused kernels: in the interpreter, and on a GPU if there is one."""

import pytest
import torch
from ops.triton.specification import (
    DEVICE,
    DTYPES,
    TOLERANCE,
    assert_a_graph_replays,
    assert_close_to_specification,
    relative_error,
    where_few_keys_are_in_sight,
)
from oracle import gradients, make_map, rows

from schoenbat import SchoenbAt, kernelized_attention, rmfa_window

pytest.importorskip("triton")


def windowed(query, key, value, features, query_map=None, key_map=None, **options):
    maps = None if query_map is None else (query_map, key_map)
    return rmfa_window(query, key, value, features, far_maps=maps, **options)


def draw(length, heads=1, key_heads=None, dim=16, value_dim=None, dtype=torch.float32, batch=1):
    key_heads = key_heads or heads
    shapes = (heads, length, dim), (key_heads, length, dim), (key_heads, length, value_dim or dim)
    return [rows(batch, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def near_identity(heads, dim):
    """Maps of far rows, not yet far from none."""
    maps = (torch.eye(dim) + 0.3 * rows(h, dim, dim, seed=12, dtype=torch.float32) for h in heads)
    return dict(zip(("query_map", "key_map"), maps, strict=True))


def some_masked(batch, length):
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, :3] = False
    return mask.to(DEVICE)


def assert_close(features, tensors, scale, width, **options):
    heads = tensors[0].shape[1]
    trained = {"far_weight": torch.linspace(0.4, 2.0, heads), **options.pop("trained", {})}
    options = {"width": width, "enable_gqa": True, "attention": windowed, "trained": trained, **options}
    assert_close_to_specification(features, tensors, scale, **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("construction", "dtype", "length", "width"),
    [
        ("exact-low", torch.float32, 40, 0),
        ("exact-low", torch.float16, 70, 3),
        ("unbiased", torch.float16, 65, 0),
        pytest.param("exact-low", torch.float16, 170, 33, marks=pytest.mark.slow),
        pytest.param("unbiased", torch.float32, 100, 5, marks=pytest.mark.slow),
        ("exact-low", torch.float32, 1, 0),
        ("exact-low", torch.float32, 20, 50),
    ],
)
def test_matches_the_specification(few_programs, construction, dtype, length, width, is_causal):
    """Windows narrower and wider than a tile, and than the sequence."""
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE)
    assert_close(features, draw(length, dtype=dtype), torch.tensor([1.3]), width, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_is_far_where_heads_are_many(one_segment, is_causal):
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    options = {"key_mask": some_masked(1, 70), "is_causal": is_causal}
    assert_close(features, draw(70), torch.tensor([1.3]), 3, **options)


@pytest.mark.parametrize(
    ("is_causal", "length", "width"),
    [(False, 40, 0), (True, 40, 0), pytest.param(False, 100, 2, marks=pytest.mark.slow)],
)
def test_masks_groups_and_maps_of_all_kinds(is_causal, length, width):
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, num_heads=2)
    tensors = draw(length, heads=4, key_heads=2, value_dim=20, dtype=torch.float16)
    options = {"key_mask": some_masked(1, length), "is_causal": is_causal}
    trained = near_identity((4, 2), 16)
    assert_close(features, tensors, torch.linspace(0.5, 2.0, 4), width, trained=trained, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_masked_may_be_nan(is_causal):
    """And a sequence may have no other keys: then its outputs and gradients are zeros."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(20, batch=3, dtype=torch.float16)]
    mask = some_masked(3, 20)
    mask[1] = False
    for x in tensors[1:]:
        x[~mask[:, None]] = torch.nan
    maps = near_identity((1, 1), 16)
    inputs = [x.requires_grad_() for x in (*tensors, *(x.to(DEVICE) for x in maps.values()))]
    options = {"width": 2, "key_mask": mask, "is_causal": is_causal}
    (got, grads), (right, right_grads) = (
        gradients(
            lambda name=name: windowed(*inputs[:3], features, *inputs[3:], implementation=name, **options),
            inputs,
        )
        for name in ("triton", "eager")
    )
    for a, b in zip([got, *grads], [right, *right_grads], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.float16]
    assert not got[1].any()
    assert not any(grad[1].any() for grad in grads[:3])


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"), [(20, 24, 10), (5, 3, 2), (16, 16, 17), (16, 131, 40)]
)
def test_widths_that_divide_nothing(head_dim, value_dim, num_features):
    """Projected linear features; few features; none but identities; values in parts."""
    features = make_map("exact-low", head_dim, num_features, dtype=torch.float32, device=DEVICE)
    assert_close(features, draw(20, dim=head_dim, value_dim=value_dim), torch.tensor([1.5]), 3)


@pytest.mark.parametrize(("dtype", "is_causal"), [(torch.float32, True), (torch.float16, False)])
def test_an_active_floor_has_gradients(dtype, is_causal):
    """Opposed means: all logits of a row are far below zero, near ones as well as the floor."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, scale=2.0)
    query, key, value = draw(70 if dtype == torch.float16 else 40, dtype=dtype)
    shift = rows(1, 1, 1, 16, seed=8, dtype=dtype)
    tensors = [query + shift, key - shift, value]
    assert_close(features, tensors, torch.tensor([2.0]), 4, is_causal=is_causal)


def test_the_scale_may_be_zero():
    features = make_map("unbiased", 16, 40, dtype=torch.float32, device=DEVICE)
    assert_close(features, draw(20, dtype=torch.float16), torch.tensor([0.0]), 3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_that_holds_every_key_is_softmax(dtype, is_causal):
    """With logits of ±100: the exponentials are taken under the row's largest."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = (x.to(DEVICE) for x in draw(40, dtype=dtype))
    options = {"is_causal": is_causal, "scale": 1.0}
    got = rmfa_window(10 * query, 10 * key, value, features, 40, implementation="triton", **options)
    doubles = (x.double() for x in (10 * query, 10 * key, value))
    assert relative_error(got, kernelized_attention(*doubles, **options)) < TOLERANCE[dtype]


@pytest.mark.parametrize("is_causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_large_values_stay_in_the_range_of_half_precision(few_programs, is_causal):
    """Sums of 100 values of 3,000 would not."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    query, _, value = (x.to(DEVICE) for x in draw(100, dtype=torch.float16))
    query = query[..., :1, :].expand(query.shape)
    inputs = [x.contiguous().requires_grad_() for x in (query, query, 3000 * value.abs())]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    call = lambda xs, name: rmfa_window(*xs, features, 5, is_causal=is_causal, implementation=name)  # noqa: E731
    got, grads = gradients(lambda: call(inputs, "triton"), inputs)
    right, right_grads = gradients(lambda: call(exact_inputs, "eager"), exact_inputs)
    for a, b in zip([got, grads[2]], [right, right_grads[2]], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.float16]
    assert all(grad.isfinite().all() for grad in grads)


def test_no_rows():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    nothing = [x.to(DEVICE)[..., :0, :] for x in draw(1)]
    assert rmfa_window(*nothing, features, 3, implementation="triton").shape == (1, 1, 0, 16)


@pytest.mark.parametrize("is_causal", [False, True])
def test_two_runs_are_bit_equal_and_inputs_need_not_be_contiguous(is_causal):
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 20, 2, 16, seed=i, dtype=torch.float16).to(DEVICE).transpose(1, 2) for i in range(3)]
    tensors = [x.requires_grad_() for x in tensors]
    copies = [x.detach().contiguous().requires_grad_() for x in tensors]
    results = [
        gradients(
            lambda xs=xs: rmfa_window(*xs, features, 4, is_causal=is_causal, implementation="triton"), xs
        )
        for xs in (tensors, copies)
    ]
    for a, b in zip(*([out, *grads] for out, grads in results), strict=True):
        assert torch.equal(a, b)


def test_operator_is_well_formed():
    from schoenbat.ops.triton import library_window
    from schoenbat.ops.triton.plan import make_plan

    feature_map = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE).map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, torch.float32, 16)
    x = [rows(1, 1, 1, 5, 16, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(5)]
    scale, log_weight = (torch.ones(1, 1, 1, 1, device=DEVICE, requires_grad=True) for _ in range(2))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    small = plan.tensors, feature_map.coefficients, scale, log_weight, plan.flags, 1.2, 1
    for far, is_causal in (([], True), (x[3:], False)):
        arguments = (*x[:3], far, None, *small, is_causal)
        torch.library.opcheck(library_window.attend.operator, arguments, test_utils=checks)


def test_what_it_does_not_do_raises():
    tensors = [x.to(DEVICE) for x in draw(10)]
    trained = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, trainable=True)
    with pytest.raises(NotImplementedError, match="no gradients to a trainable map"):
        rmfa_window(*tensors, trained, 2, implementation="triton")
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"the query is torch\.float64"):
        rmfa_window(*(x.double() for x in tensors), features, 2, implementation="triton")


def draw_mask(batch, length):
    return (torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)


def where_few_far_keys_are_in_sight(features, tensors, scale, width, mask, is_causal):
    at = torch.arange(tensors[0].shape[-2], device=DEVICE)
    behind = at[:, None] - at
    far = behind > width if is_causal else behind.abs() > width
    return where_few_keys_are_in_sight(features, tensors, scale, far & mask[:, None, None, :])


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize("width", [0, 5, 64, 200])
@pytest.mark.parametrize("length", [1, 63, 500, 4096])
def test_matches_the_specification_on_a_gpu(length, width, construction, dtype, is_causal):
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    tensors, scale = draw(length, heads=4, dim=64, dtype=dtype), torch.linspace(0.5, 2.5, 4)
    mask, few_keys = draw_mask(1, length), None
    # Exact-low in 16 bits: hundreds of keys add up closer to the floor than a bound of their rounding.
    if length <= 63 or dtype == torch.float32:
        few_keys = where_few_far_keys_are_in_sight(features, tensors, scale, width, mask, is_causal)
    options = {"key_mask": mask, "is_causal": is_causal, "few_keys": few_keys}
    assert_close(features, tensors, scale, width, exact="eager", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"),
    [
        (16, 16, 64),
        (32, 24, 64),
        (32, 48, 128),
        (64, 32, 128),
        (64, 64, 512),
        (128, 128, 256),
        (80, 128, 512),
        (64, 192, 128),
    ],
)
def test_every_width_on_a_gpu(construction, head_dim, value_dim, num_features, is_causal):
    features = make_map(construction, head_dim, num_features, dtype=torch.float32, device=DEVICE)
    shape = {"heads": 4, "key_heads": 2, "dim": head_dim, "value_dim": value_dim, "dtype": torch.bfloat16}
    trained = near_identity((4, 2), head_dim)
    # Rows that are multiplied by a matrix first are rounded once more.
    options = {"exact": "eager", "is_causal": is_causal, "trained": trained, "roundings": 1.5}
    assert_close(features, draw(1000, **shape), torch.linspace(0.5, 2.5, 4), 50, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_two_runs_are_bit_equal_on_a_gpu(construction, is_causal):
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(4096, heads=8, dim=64, dtype=torch.bfloat16)]
    call = lambda: rmfa_window(*tensors, features, 64, is_causal=is_causal, implementation="triton")  # noqa: E731
    first, again = (gradients(call, tensors) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_compiles_to_one_graph(construction, is_causal):
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(500, heads=4, dim=64, dtype=torch.bfloat16)]

    def attend():
        return rmfa_window(*tensors, features, 64, is_causal=is_causal, implementation="triton")

    compiled = torch.compile(attend, fullgraph=True)
    (got, got_grads), (right, right_grads) = (gradients(f, tensors) for f in (compiled, attend))
    for a, b in zip([got, *got_grads], [right, *right_grads], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_graph_of_it_replays(is_causal):
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(500, heads=4, dim=64, dtype=torch.bfloat16)]
    options = {"is_causal": is_causal, "implementation": "triton"}
    assert_a_graph_replays(lambda: rmfa_window(*tensors, features, 64, **options), tensors)


@pytest.mark.gpu
def test_no_kernel_is_compiled_again_for_another_length_or_width():
    from schoenbat.ops.triton.kernels import window

    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)

    def kernels(length, width):
        tensors = [x.to(DEVICE) for x in draw(length, heads=2, dim=64, dtype=torch.bfloat16)]
        rmfa_window(*tensors, features, width, implementation="triton")
        return len(window.read.device_caches[torch.cuda.current_device()][0])

    first = kernels(300, 16)
    assert all(kernels(*sizes) == first for sizes in ((301, 1), (1, 0), (16, 16), (4096, 200)))


def test_auto_takes_half_precision_without_gradients(auto_takes_the_kernels):
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(20, dtype=torch.float16)]
    triton, eager = (rmfa_window(*tensors, features, 3, implementation=name) for name in ("triton", "eager"))
    assert not torch.equal(triton, eager)
    assert torch.equal(rmfa_window(*tensors, features, 3), triton)
    scale = torch.tensor([1.0], device=DEVICE, requires_grad=True)
    with pytest.raises(NotImplementedError, match="in float16 gradients are taken by name alone"):
        rmfa_window(*tensors, features, 3, scale=scale)
    with torch.no_grad():
        rmfa_window(*tensors, features, 3, scale=scale)


@pytest.mark.gpu
def test_auto_and_modules_take_them():
    features = make_map("unbiased", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(300, heads=2, dim=64, dtype=torch.bfloat16)]
    triton, eager = (rmfa_window(*tensors, features, 20, implementation=name) for name in ("triton", "eager"))
    assert torch.equal(rmfa_window(*tensors, features, 20), triton)
    assert not torch.equal(triton, eager)
    module = SchoenbAt(64, 2, 128, construction="exact-low", window=20).to(DEVICE)
    got, exact = module(*tensors), module.double()(*(x.double() for x in tensors))
    assert relative_error(got, exact) < TOLERANCE[torch.bfloat16]
