"""Causal attention by fused kernels: in the interpreter, and on a GPU if there is one."""

import pytest
import torch
from functorch.compile import make_boxed_compiler, min_cut_rematerialization_partition
from ops.triton.specification import (
    DEVICE,
    DTYPES,
    TOLERANCE,
    assert_a_graph_replays,
    assert_close_to_specification,
    draw,
    relative_error,
    where_few_keys_are_in_sight,
)
from oracle import gradients, make_map, rows
from torch._dynamo.backends.common import aot_autograd

from schoenbat import SchoenbAt, rmfa
from schoenbat.functional import attend
from schoenbat.ops.unit_rows import UnitRows

pytest.importorskip("triton")
CONSTRUCTIONS = ["exact-low", "unbiased", "paper"]


@pytest.mark.parametrize(
    ("construction", "dtype", "length"),
    [
        ("exact-low", torch.float32, 70),
        ("exact-low", torch.float16, 200),
        ("unbiased", torch.float32, 63),
        ("unbiased", torch.float16, 100),
        ("paper", torch.float32, 17),
        ("paper", torch.float16, 17),
    ],
)
def test_matches_the_specification(few_programs, construction, dtype, length):
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = draw(length, length, dtype=dtype)
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), is_causal=True)


@pytest.mark.parametrize(
    ("construction", "dim", "num_features", "dtype", "queries"),
    [
        ("exact-low", 16, 40, torch.float32, 70),
        ("exact-low", 40, 80, torch.float16, 150),
        ("unbiased", 16, 40, torch.float16, 40),
    ],
)
def test_nothing_is_far_where_heads_are_many(one_segment, construction, dim, num_features, dtype, queries):
    """Sums by several programs and by one, which is the second case; queries that begin inside the keys."""
    features = make_map(construction, dim, num_features, dtype=torch.float32, device=DEVICE)
    tensors = draw(queries, 150, dim=dim, dtype=dtype)
    mask = (torch.rand(1, 150, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "is_causal": True}
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), **options)


@pytest.mark.parametrize(
    ("construction", "dtype"), [("exact-low", torch.float16), ("unbiased", torch.float32)]
)
def test_a_sequence_of_many_segments(construction, dtype):
    """Each of one tile, more than `scan` loads at once."""
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = draw(200, 200, dtype=dtype)
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), is_causal=True)


@pytest.mark.parametrize("queries", [200, 130])
def test_a_program_gives_several_tiles_of_outputs(few_programs, queries):
    """Of a map with one group of pairs, of heads neither narrow nor wide; rows normalised on the way."""
    features = make_map("exact-low", 40, 80, dtype=torch.float32, device=DEVICE)
    tensors = draw(queries, 200, dim=40, dtype=torch.float16)
    mask = (torch.rand(1, 200, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "is_causal": True, "unit_rows": UnitRows(False, 1e-3)}
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), **options)


@pytest.mark.parametrize(
    ("dim", "num_features", "length", "dtype"), [(16, 40, 40, torch.float32), (40, 80, 200, torch.float16)]
)
def test_linear_features_may_differ_in_weight(few_programs, dim, num_features, length, dtype):
    """Where a program gives several tiles, too: the second case."""
    features = make_map("exact-low", dim, num_features, dtype=torch.float32, device=DEVICE)
    features.feature_weights[1 : 1 + dim] *= torch.linspace(0, 2, dim, device=DEVICE)
    tensors = draw(length, length, dim=dim, dtype=dtype)
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), is_causal=True)


@pytest.mark.gpu
def test_linear_features_may_differ_in_weight_on_a_gpu():
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    features.feature_weights[1:65] *= torch.linspace(0, 2, 64, device=DEVICE)
    tensors = draw(9000, 9000, dim=64, dtype=torch.bfloat16)
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), "eager", is_causal=True)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (17, 63), (63, 17)])
def test_the_last_query_is_beside_the_last_key(queries, keys):
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    assert_close_to_specification(features, draw(queries, keys), torch.tensor([1.3]), is_causal=True)


def test_masks_groups_and_maps_per_head(few_programs):
    """A sequence that begins with masked keys, and one that has no others."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, num_heads=2)
    tensors = draw(24, 24, heads=4, key_heads=2, value_dim=20, batch=2)
    mask = (torch.rand(2, 24, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[0, :3], mask[1] = False, False
    options = {"key_mask": mask, "enable_gqa": True, "is_causal": True}
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 3.0, 4), **options)


@pytest.mark.parametrize("unit_rows", [None, UnitRows(True, 1e-13)])
def test_what_is_masked_may_be_nan(unit_rows):
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(20, 20)]
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    mask[:, :7] = False
    for x in tensors[1:]:
        x[..., :7, :] = torch.nan
    inputs = [x.requires_grad_() for x in tensors]
    options = {"is_causal": True, "unit_rows": unit_rows}
    call = lambda: attend(*inputs, features, key_mask=mask, implementation="triton", **options)  # noqa: E731
    got, grads = gradients(call, inputs)
    later = [x[..., 7:, :].detach() for x in tensors]
    torch.testing.assert_close(got[..., 7:, :], attend(*later, features, implementation="eager", **options))
    assert not got[..., :7, :].any()
    assert all(grad.isfinite().all() for grad in grads)
    assert not any(grad[..., :7, :].any() for grad in grads)


def draw_long_and_short(queries, keys, **shape):
    """Rows to be normalised: long ones, one below the least norm, a constant one and one of zeros.

    What is short has large gradients: these see enough keys, else their rounding were all that is compared.
    """
    query, key, value = draw(queries, keys, heads=2, key_heads=1, **shape)
    query, key = 3 * query + 0.5, 3 * key + 0.5
    for x in (query, key):
        x[..., -3, :], x[..., -5, :] = 0.0, 2.0
        x[..., -7, :] *= 1e-3
    return query, key, value


@pytest.mark.parametrize(
    ("construction", "dtype", "queries", "keys", "centred"),
    [
        ("exact-low", torch.float32, 40, 40, True),
        ("exact-low", torch.float16, 90, 70, True),
        ("unbiased", torch.float32, 18, 37, False),
        ("unbiased", torch.float16, 80, 80, False),
    ],
)
def test_rows_are_normalised_on_the_way(few_programs, construction, dtype, queries, keys, centred):
    features = make_map(construction, 20, 40, dtype=torch.float32, device=DEVICE)
    tensors = draw_long_and_short(queries, keys, dim=20, dtype=dtype)
    mask = (torch.rand(1, keys, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "enable_gqa": True, "is_causal": True, "unit_rows": UnitRows(centred, 1e-3)}
    assert_close_to_specification(features, tensors, torch.tensor([0.7, 1.3]), **options)


@pytest.mark.parametrize("normalization", ["token", "l2"])
def test_a_module_normalises_on_the_way(few_programs, auto_takes_the_kernels, normalization):
    """As it would before the call: the whole sequence, pieces that go on from a state, and one token."""
    options = {"construction": "exact-low", "normalization": normalization, "seed": 0, "device": DEVICE}
    module = SchoenbAt(20, 1, 24, **options)
    inputs = [(3 * x + 0.5).to(DEVICE).requires_grad_() for x in draw(24, 24, dim=20)]
    mask = torch.arange(24, device=DEVICE)[None] >= 5
    wanted = [*inputs, *module.parameters()]

    def outside():
        query, key, value = inputs
        options = {"key_mask": mask, "is_causal": True}
        return module.post(module.attend(module.query_norm(query), module.key_norm(key), value, **options))

    def in_pieces(cut):
        pieces, state = [], None
        for start, end in ((0, cut), (cut, 24)):
            piece = [x[..., start:end, :] for x in inputs]
            out, state = module.step(*piece, state, key_mask=mask[:, start:end])
            pieces.append(out)
        return torch.cat(pieces, dim=-2)

    right = gradients(outside, wanted)
    whole = gradients(lambda: module(*inputs, key_mask=mask, is_causal=True), wanted)
    torch.testing.assert_close(whole, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(lambda: in_pieces(20), wanted), right, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(23), right[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"),
    [(20, 24, 10), (5, 3, 2), (16, 16, 17), (16, 131, 40), (130, 24, 150)],
)
def test_widths_that_divide_nothing(head_dim, value_dim, num_features):
    """Projected linear features; few features; none but identities; values in parts; a wide identity."""
    features = make_map("exact-low", head_dim, num_features, dtype=torch.float32, device=DEVICE)
    tensors = draw(20, 20, dim=head_dim, value_dim=value_dim)
    assert_close_to_specification(features, tensors, torch.tensor([1.5]), is_causal=True)


def test_wide_heads_on_a_smaller_gpu(few_programs, smaller_gpu):
    features = make_map("exact-low", 72, 140, dtype=torch.float32, device=DEVICE)
    tensors = draw(70, 70, dim=72, dtype=torch.float16)
    assert_close_to_specification(features, tensors, torch.tensor([1.5]), is_causal=True)


def test_an_active_floor_has_gradients(few_programs):
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, scale=2.0)
    query, key, value = draw(40, 40)
    shift = rows(1, 1, 1, 16, seed=8, dtype=torch.float32)
    assert_close_to_specification(
        features, [query + shift, key - shift, value], torch.tensor([2.0]), is_causal=True
    )


def test_the_scale_may_be_zero():
    features = make_map("unbiased", 16, 40, dtype=torch.float32, device=DEVICE)
    assert_close_to_specification(features, draw(20, 20, heads=2), torch.tensor([0.0, 1.0]), is_causal=True)


def test_large_values_stay_in_the_range_of_half_precision(few_programs):
    """Sums of 300 values of 1,000 would not."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = (x.to(DEVICE) for x in draw(300, 300, dtype=torch.float16))
    query, key = query[..., :1, :].expand(query.shape), query[..., :1, :].expand(key.shape)
    inputs = [x.contiguous().requires_grad_() for x in (query, key, 1000 * value.abs())]
    got, grads = gradients(lambda: rmfa(*inputs, features, is_causal=True, implementation="triton"), inputs)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    right, right_grads = gradients(lambda: rmfa(*exact_inputs, features, is_causal=True), exact_inputs)
    for a, b in zip([got, grads[2]], [right, right_grads[2]], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.float16]
    assert all(grad.isfinite().all() for grad in grads)


def test_nothing_to_attend_to():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = (x.to(DEVICE).requires_grad_() for x in draw(17, 1))
    options = {"is_causal": True, "implementation": "triton"}
    nothing = rmfa(query, key[..., :0, :], value[..., :0, :], features, **options)
    assert torch.equal(nothing, torch.zeros_like(query))
    assert rmfa(query[..., :0, :], key, value, features, **options).shape == (1, 1, 0, 16)
    nothing.sum().backward()
    assert not query.grad.any()


def test_two_runs_are_bit_equal_and_inputs_need_not_be_contiguous():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 24, 2, 16, seed=i, dtype=torch.float32).to(DEVICE).transpose(1, 2) for i in range(3)]
    tensors = [x.requires_grad_() for x in tensors]
    call = lambda: rmfa(*tensors, features, is_causal=True, implementation="triton")  # noqa: E731
    first, again = (gradients(call, tensors) for _ in range(2))
    right = gradients(lambda: rmfa(*tensors, features, is_causal=True, implementation="eager"), tensors)
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    torch.testing.assert_close(first, right)


@pytest.mark.parametrize(
    ("dtype", "dim", "num_features", "tiles"),
    [
        (torch.bfloat16, 64, 128, 1),
        (torch.bfloat16, 64, 512, 2),
        (torch.bfloat16, 128, 256, 1),
        (torch.float32, 16, 40, 2),
    ],
)
def test_sums_take_no_more_memory_than_the_inputs(dtype, dim, num_features, tiles):
    """The more features, the more tiles share a chunk; the last case is that of the tests above."""
    from schoenbat.ops.triton.axis import Axis, near_sizes
    from schoenbat.ops.triton.call import Shape
    from schoenbat.ops.triton.plan import make_plan

    feature_map = make_map("exact-low", dim, num_features, dtype=torch.float32).map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, dtype, dim)
    query = torch.empty(4, 8, 1, 4096, dim, dtype=dtype, device="meta")
    shape = Shape.of(query, query)
    axis = Axis.of(4096, 4096, shape, plan)
    near, *_ = near_sizes(axis, shape, plan)
    assert axis.chunk == tiles
    assert 32 * torch.Size(near).numel() <= 4 * query.numel()


def test_sums_are_not_kept_for_the_backward_pass():
    """With every row more, the backward pass keeps query, key, value, output and three numbers."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)

    def kept(length: int) -> int:
        tensors = [rows(1, 1, length, 16, seed=i, dtype=torch.float32).to(DEVICE) for i in range(3)]
        sizes: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            rmfa(*(x.requires_grad_() for x in tensors), features, is_causal=True, implementation="triton")
        return sum(sizes.values())

    assert kept(160) - kept(80) == 80 * (4 * 16 + 3)


def test_operator_is_well_formed():
    from schoenbat.ops.triton import library
    from schoenbat.ops.triton.call import keys_seen
    from schoenbat.ops.triton.plan import make_plan

    feature_map = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE).map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, torch.float32, 16)
    x = [rows(1, 1, 1, 5, 16, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(3)]
    scale = torch.ones(1, 1, 1, 1, device=DEVICE, requires_grad=True)
    small = plan.tensors, [], feature_map.coefficients, scale, plan.flags, 1.2, 2, 1e-13
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    mask = torch.tensor([True, False, True, True, True], device=DEVICE).view(1, 1, 1, 5, 1)
    for masked in [(None, None), (mask, keys_seen(mask, 5))]:
        arguments = *x, *masked, [], None, *small
        torch.library.opcheck(library.attend_causal.operator, arguments, test_utils=checks)
    with pytest.raises(ValueError, match="a mask comes with"):
        library.attend_causal(*x, mask, None, [], None, *small)


def test_compiled_layers_count_the_keys_they_see_once():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(40, 40)]
    mask = (torch.rand(1, 40, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    sums = []

    def count(graph, _):
        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        sums.append(sum("cumsum" in call for call in calls))
        return graph

    def two_layers():
        options = {"key_mask": mask, "is_causal": True, "implementation": "triton"}
        out = rmfa(*tensors, features, **options)
        return rmfa(out, *tensors[1:], features, **options)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=make_boxed_compiler(count), partition_fn=partition)
    (got, got_grads), (right, right_grads) = (
        gradients(f, tensors)
        for f in (torch.compile(two_layers, fullgraph=True, backend=backend), two_layers)
    )
    assert sums == [1, 0]
    for a, b in zip([got, *got_grads], [right, *right_grads], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("length", [1, 63, 500, 1000, 4096, 16384 + 7])
def test_matches_the_specification_on_a_gpu(dtype, construction, length):
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    tensors, scale = draw(length, length, heads=4, dim=64, dtype=dtype), torch.linspace(0.5, 2.5, 4)
    mask = (torch.rand(1, length, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    few_keys = None
    if length <= 63:
        causal = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        few_keys = where_few_keys_are_in_sight(features, tensors, scale, causal & mask[:, None, None, :])
    options = {"key_mask": mask, "is_causal": True}
    assert_close_to_specification(features, tensors, scale, "eager", few_keys, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("taken", [(False, False), (True, False)])
def test_either_pass_may_be_of_the_kernels_for_all_gpus(monkeypatch, taken):
    """Hopper's own for the forward pass, as trained maps have it, or for none."""
    from schoenbat.ops.triton import launch_causal

    goes, calls = launch_causal.goes_in_one_pass, iter(taken)
    monkeypatch.setattr(launch_causal, "goes_in_one_pass", lambda *call: next(calls) and goes(*call))
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = draw(3000, 3000, heads=4, dim=64, dtype=torch.bfloat16)
    mask = (torch.rand(1, 3000, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    options = {"key_mask": mask, "is_causal": True}
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 2.5, 4), "eager", **options)
    assert next(calls, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("construction", "dtype", "queries", "keys", "dim", "num_features", "centred"),
    [
        ("exact-low", torch.bfloat16, 1000, 1000, 64, 128, True),
        ("exact-low", torch.bfloat16, 1000, 1000, 64, 128, False),
        ("exact-low", torch.bfloat16, 4096, 3000, 64, 512, True),
        ("exact-low", torch.bfloat16, 900, 2000, 80, 256, True),
        ("exact-low", torch.float16, 1000, 1000, 64, 128, True),
        ("exact-low", torch.float32, 1000, 1000, 32, 128, True),
        ("unbiased", torch.bfloat16, 1000, 1000, 64, 128, True),
        ("unbiased", torch.bfloat16, 4096, 3000, 64, 512, True),
        ("unbiased", torch.bfloat16, 900, 2000, 32, 128, False),
        ("unbiased", torch.float16, 1000, 1000, 64, 128, True),
        ("unbiased", torch.float32, 1000, 1000, 64, 128, True),
    ],
)
def test_rows_are_normalised_on_a_gpu(construction, dtype, queries, keys, dim, num_features, centred):
    features = make_map(construction, dim, num_features, dtype=torch.float32, device=DEVICE)
    tensors = draw_long_and_short(queries, keys, dim=dim, dtype=dtype)
    scale, unit_rows = torch.tensor([0.7, 2.0]), UnitRows(centred, 1e-3)
    mask = (torch.rand(1, keys, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    few_keys = None
    if construction == "unbiased":
        # Where a denominator is within rounding of its floor, gradients of such maps jump: not compared.
        scale = torch.tensor([1.0, 1.5])
        causal = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)
        unit = [*map(unit_rows, tensors[:2]), tensors[2]]
        clear, _ = where_few_keys_are_in_sight(features, unit, scale, causal & mask[:, None, None, :])
        few_keys = clear, (0.3, 0.3)
    options = {"key_mask": mask, "enable_gqa": True, "is_causal": True, "unit_rows": unit_rows}
    assert_close_to_specification(features, tensors, scale, "eager", few_keys, **options)


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
        (64, 64, 512),
        (64, 192, 128),
        (256, 128, 300),
        (160, 256, 512),
    ],
)
def test_every_width_on_a_gpu(construction, head_dim, value_dim, num_features):
    features = make_map(construction, head_dim, num_features, dtype=torch.float32, device=DEVICE)
    shape = {"heads": 4, "key_heads": 2, "dim": head_dim, "value_dim": value_dim, "dtype": torch.bfloat16}
    options = {"is_causal": True, "enable_gqa": True}
    scale = torch.linspace(0.5, 2.5, 4)
    assert_close_to_specification(features, draw(900, 1000, **shape), scale, "eager", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize(("head_dim", "num_features"), [(32, 128), (64, 128), (128, 256)])
def test_many_heads_on_a_gpu(construction, head_dim, num_features):
    features = make_map(construction, head_dim, num_features, dtype=torch.float32, device=DEVICE)
    tensors = draw(1000, 1000, heads=8, dim=head_dim, dtype=torch.bfloat16, batch=16)
    scale = torch.linspace(0.5, 2.5, 8)
    assert_close_to_specification(features, tensors, scale, "eager", is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_to_one_graph(construction, mode):
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(500, 500, heads=4, dim=64, dtype=torch.bfloat16)]

    def attend():
        return rmfa(*tensors, features, is_causal=True, implementation="triton")

    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    for _ in range(3):  # the third call replays a CUDA graph
        got, got_grads = (x if isinstance(x, list) else x.clone() for x in gradients(compiled, tensors))
    right, right_grads = gradients(attend, tensors)
    for a, b in zip([got, *got_grads], [right, *right_grads], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_a_graph_of_it_replays(construction):
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    # So long that a program gives several tiles of outputs.
    tensors = draw(9000, 9000, heads=4, dim=64, dtype=torch.bfloat16)
    tensors = [x.to(DEVICE).requires_grad_() for x in tensors]
    assert_a_graph_replays(lambda: rmfa(*tensors, features, is_causal=True), tensors)


@pytest.mark.gpu
def test_auto_takes_the_kernels():
    features = make_map("unbiased", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(300, 300, heads=2, dim=64, dtype=torch.bfloat16)]
    auto, triton, eager = (
        rmfa(*tensors, features, is_causal=True, implementation=name) for name in ("auto", "triton", "eager")
    )
    assert torch.equal(auto, triton)
    assert not torch.equal(auto, eager)
