"""Maps that are trained by fused kernels: in the interpreter, and on a GPU if there is one."""

import copy

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

from schoenbat import RMFAState, SchoenbAt, rmfa
from schoenbat.ops import fused
from schoenbat.ops.unit_rows import UnitRows

pytest.importorskip("triton")
BOTH = pytest.mark.parametrize("is_causal", [False, True])


def make_trained(construction, head_dim=16, num_features=40, **options):
    options = {"dtype": torch.float32, "device": DEVICE, **options}
    return make_map(construction, head_dim, num_features, trainable=True, **options)


def draw(queries, keys, heads=1, key_heads=None, dim=16, value_dim=None, dtype=torch.float32, batch=1):
    key_heads = key_heads or heads
    shapes = (heads, queries, dim), (key_heads, keys, dim), (key_heads, keys, value_dim or dim)
    return [rows(batch, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


@BOTH
@pytest.mark.parametrize(
    ("construction", "num_features", "dtype", "queries", "keys"),
    [
        ("exact-low", 40, torch.float32, 17, 20),
        ("exact-low", 40, torch.float16, 70, 100),
        ("unbiased", 34, torch.float32, 5, 17),
        ("unbiased", 12, torch.float16, 70, 70),
        ("paper", 12, torch.float32, 17, 9),
        ("paper", 40, torch.float16, 9, 17),
    ],
)
def test_matches_the_specification(few_programs, construction, num_features, dtype, queries, keys, is_causal):
    features = make_trained(construction, num_features=num_features, scale=1.0)
    tensors = draw(queries, keys, dtype=dtype)
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), is_causal=is_causal)


def test_nothing_is_far_where_heads_are_many(one_segment):
    features = make_trained("exact-low", num_features=40, scale=1.0)
    assert_close_to_specification(features, draw(40, 50), torch.tensor([1.3]), is_causal=True)


@pytest.mark.parametrize(
    ("construction", "num_features", "num_heads", "is_causal"),
    [("exact-low", 20, 2, False), ("exact-low", 20, 2, True), ("paper", 8, None, False)],
)
def test_masks_groups_and_maps_per_head(few_programs, construction, num_features, num_heads, is_causal):
    """A sequence that begins with masked keys, and one that has no others; values of another width."""
    features = make_trained(construction, num_features=num_features, num_heads=num_heads)
    tensors = draw(9, 12, heads=4, key_heads=2, value_dim=20, batch=2)
    mask = (torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[0, :5], mask[1] = False, False
    options = {"key_mask": mask, "enable_gqa": True, "is_causal": is_causal}
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 3.0, 4), **options)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features", "is_causal"),
    [
        *((20, 24, 10, True), (5, 3, 2, False), (16, 16, 17, False), (16, 16, 17, True), (5, 131, 8, False)),
        *((130, 24, 150, False), (130, 24, 150, True)),
    ],
)
def test_widths_that_divide_nothing(few_programs, head_dim, value_dim, num_features, is_causal):
    """Projected linear features; few; none but identities; values in parts, which all give to the map; an
    identity that is spelt out.
    """
    features = make_trained("exact-low", head_dim, num_features)
    tensors = draw(18, 18, dim=head_dim, value_dim=value_dim)
    assert_close_to_specification(features, tensors, torch.tensor([1.5]), is_causal=is_causal)


@pytest.mark.parametrize(("head_dim", "num_features"), [(16, 100), (5, 30), (32, 60)])
def test_pairs_in_a_wide_group_and_pairs_with_a_tail(few_programs, head_dim, num_features):
    features = make_trained("exact-low", head_dim, num_features)
    assert_close_to_specification(features, draw(18, 18, dim=head_dim), torch.tensor([1.5]))


@BOTH
def test_an_active_floor_has_gradients(few_programs, is_causal):
    """For a₀ and a₁, too: both gains have nothing else to get, where the floor is all that is left."""
    features = make_trained("exact-low", scale=2.0)
    query, key, value = draw(20, 20)
    shift = rows(1, 1, 1, 16, seed=8, dtype=torch.float32)
    tensors = [query + shift, key - shift, value]
    assert_close_to_specification(features, tensors, torch.tensor([2.0]), is_causal=is_causal)


@BOTH
def test_rows_are_normalised_on_the_way(few_programs, is_causal):
    features = make_trained("exact-low", 20)
    tensors = [3 * x + 0.5 for x in draw(18, 18, dim=20)]
    options = {"unit_rows": UnitRows(True, 1e-3), "is_causal": is_causal}
    assert_close_to_specification(features, tensors, torch.tensor([1.3]), **options)


@BOTH
@pytest.mark.parametrize("degree", [1, 2])
def test_a_gain_of_zero_has_finite_gradients(few_programs, degree, is_causal):
    features = make_trained("exact-low")
    with torch.no_grad():
        features.gains[:, degree] = 0
    assert_close_to_specification(features, draw(9, 9), torch.tensor([1.0]), is_causal=is_causal)


@BOTH
def test_what_is_masked_may_be_nan(few_programs, is_causal):
    features = make_trained("exact-low", num_features=20)
    tensors = [x.to(DEVICE) for x in draw(20, 20)]
    mask = torch.arange(20, device=DEVICE)[None] >= 7
    parameters = list(features.parameters())
    options = {"is_causal": is_causal, "implementation": "triton"}
    clean = tensors[0], *(x.clone().nan_to_num() for x in tensors[1:])
    _, right = gradients(lambda: rmfa(*clean, features, key_mask=mask, **options), parameters)
    for x in tensors[1:]:
        x[..., :7, :] = torch.nan
    _, grads = gradients(lambda: rmfa(*tensors, features, key_mask=mask, **options), parameters)
    assert all(torch.equal(a, b) for a, b in zip(grads, right, strict=True))


def test_what_is_frozen_gets_nothing(few_programs):
    """Either the gains or the directions alone: gradients are those of a map that is trained as a whole."""
    tensors = [x.to(DEVICE) for x in draw(9, 9)]
    whole = make_trained("exact-low")
    call = lambda features: rmfa(*tensors, features, implementation="triton")  # noqa: E731
    _, (right, right_gains) = gradients(lambda: call(whole), [whole.quadratic, whole.gains])
    for name, expected in (("quadratic", right), ("gains", right_gains)):
        features = make_trained("exact-low").requires_grad_(False)
        parameter = getattr(features, name).requires_grad_()
        _, (grad,) = gradients(lambda f=features: call(f), [parameter])
        assert torch.equal(grad, expected)


@BOTH
def test_two_runs_are_bit_equal_and_inputs_need_not_be_contiguous(few_programs, is_causal):
    features = make_trained("exact-low", num_features=20)
    tensors = [rows(1, 18, 1, 16, seed=i, dtype=torch.float32).to(DEVICE).transpose(1, 2) for i in range(3)]
    inputs = [*(x.requires_grad_() for x in tensors), *features.parameters()]
    first, again, right = (
        gradients(lambda i=i: rmfa(*tensors, features, is_causal=is_causal, implementation=i), inputs)
        for i in ("triton", "triton", "eager")
    )
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    torch.testing.assert_close(first, right)


@BOTH
def test_without_gradients_a_trained_map_is_as_any_other(is_causal):
    features = make_trained("exact-low")
    x = draw(9, 9)[0].to(DEVICE)
    options = {"is_causal": is_causal, "implementation": "triton"}
    wanted = rmfa(x, x, x, features, **options)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(rmfa(x, x, x, features, **options), wanted)
            features.gains.mul_(1.1)  # what was laid out before is another map
            assert not torch.equal(rmfa(x, x, x, features, **options), wanted)
            features.gains.div_(1.1)
            wanted = rmfa(x, x, x, features, **options)


def test_sums_are_not_for_trained_maps():
    features = make_trained("exact-low")
    x = draw(9, 9)[0].to(DEVICE)
    state = RMFAState.zeros(features, 1, 1, 16, device=DEVICE)
    with pytest.raises(NotImplementedError, match="trainable map"):
        state.update(x, x, features, implementation="triton")


def test_what_was_not_run_on_a_gpu_is_taken_by_name_alone():
    query = torch.zeros(1, 1, 1, 2, 130)
    feature_map = make_trained("exact-low", 130, 140).map(torch.float32)
    assert "by name alone" in fused.map_obstacle(query, feature_map, "auto")
    assert fused.map_obstacle(query, feature_map, "triton") is None
    with torch.no_grad():  # as any other map
        assert fused.map_obstacle(query, feature_map, "auto") is None


@BOTH
def test_operator_is_well_formed(is_causal):
    from schoenbat.ops.triton import library
    from schoenbat.ops.triton.plan import make_plan, trained_map

    feature_map = make_trained("exact-low").map(torch.float32)
    blocks, weight, coefficients, _ = feature_map
    with torch.no_grad():
        plan = make_plan(blocks, weight, torch.float32, 16)
    x = [rows(1, 1, 1, 5, 16, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(3)]
    scale = torch.ones(1, 1, 1, 1, device=DEVICE, requires_grad=True)
    trained = [t.detach().requires_grad_(t.is_floating_point()) for t in trained_map(blocks, weight, 16)]
    map_and_scale = plan.tensors, trained, coefficients.detach().requires_grad_(), scale, plan.flags
    small = *map_and_scale, 1.2, 2, 1e-13
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    if is_causal:
        torch.library.opcheck(
            library.attend_causal.operator, (*x, None, None, [], None, *small), test_utils=checks
        )
    else:
        torch.library.opcheck(library.attend.operator, (*x, None, *small), test_utils=checks)


@BOTH
@pytest.mark.filterwarnings("error:Dynamo detected")  # as it does of functions that keep their results
def test_compiles_to_one_graph(few_programs, is_causal):
    features = make_trained("exact-low")
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(9, 9)]
    inputs = [*tensors, *features.parameters()]

    def attend():
        return rmfa(*tensors, features, is_causal=is_causal, implementation="triton")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, inputs), gradients(attend, inputs))


@pytest.mark.gpu
@BOTH
def test_a_graph_of_it_replays(is_causal):
    features = make_trained("exact-low", 64, 128)
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(500, 500, heads=4, dim=64, dtype=torch.bfloat16)]
    inputs = [*tensors, *features.parameters()]
    options = {"is_causal": is_causal, "implementation": "triton"}
    assert_a_graph_replays(lambda: rmfa(*tensors, features, **options), inputs)


@pytest.mark.parametrize(
    ("options", "is_causal"), [({}, True), ({"separate_maps": True, "center_keys": True}, False)]
)
def test_a_training_step_of_a_module(few_programs, request, options, is_causal):
    options = options | {"construction": "exact-low", "trainable_features": True, "seed": 0, "device": DEVICE}
    module = SchoenbAt(16, 2, 24, **options)
    tensors = [x.to(DEVICE) for x in draw(9, 9, heads=2)]
    mask = torch.arange(9, device=DEVICE)[None] < 7

    def trained():
        own = copy.deepcopy(module)
        optimizer = torch.optim.SGD(own.parameters(), lr=1.0)
        (own(*tensors, key_mask=mask, is_causal=is_causal) * tensors[0]).mean().backward()
        optimizer.step()
        return {name: (x.detach(), x.grad) for name, x in own.named_parameters()}

    eager = trained()
    request.getfixturevalue("auto_takes_the_kernels")
    fused = trained()
    torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(fused[name][1], eager[name][1]) for name in eager)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
@pytest.mark.parametrize("length", [1, 63, 500, 4096])
def test_matches_the_specification_on_a_gpu(dtype, construction, length, is_causal):
    """Rows that see few keys are another matter: see `where_few_keys_are_in_sight`."""
    features = make_trained(construction, 64, 128)
    keys = length + (100 if is_causal else 0)
    tensors = draw(length, keys, heads=4, dim=64, dtype=dtype)
    mask = (torch.rand(1, keys, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    mask[:, 0] = True
    options = {"key_mask": mask, "is_causal": is_causal}
    assert_close_to_specification(features, tensors, torch.linspace(0.5, 2.5, 4), "eager", **options)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"),
    [
        (16, 16, 64),
        (32, 24, 64),
        (32, 48, 128),
        (32, 32, 128),
        (64, 32, 128),
        (128, 128, 256),
        (80, 128, 512),
        (64, 192, 64),
        (192, 128, 256),
        (256, 256, 512),
    ],
)
def test_every_width_on_a_gpu(construction, head_dim, value_dim, num_features, is_causal):
    features = make_trained(construction, head_dim, num_features, num_heads=2)
    shape = {"heads": 4, "key_heads": 2, "dim": head_dim, "value_dim": value_dim, "dtype": torch.bfloat16}
    options = {"is_causal": is_causal, "enable_gqa": True}
    scale = torch.linspace(0.5, 2.5, 4)
    assert_close_to_specification(features, draw(900, 1000, **shape), scale, "eager", **options)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_runs_are_bit_equal_on_a_gpu(construction, dtype, is_causal):
    features = make_trained(construction, 64, 128)
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(4096, 4096, heads=8, dim=64, dtype=dtype)]
    inputs = [*tensors, *features.parameters()]
    call = lambda: rmfa(*tensors, features, is_causal=is_causal, implementation="triton")  # noqa: E731
    out, grads = gradients(call, inputs)
    for _ in range(5):
        again, more = gradients(call, inputs)
        assert torch.equal(out, again)
        assert all(torch.equal(a, b) for a, b in zip(grads, more, strict=True))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_compiles_to_one_graph_on_a_gpu(construction, is_causal):
    features = make_trained(construction, 64, 128)
    tensors = [x.to(DEVICE).requires_grad_() for x in draw(500, 500, heads=4, dim=64, dtype=torch.bfloat16)]
    inputs = [*tensors, *features.parameters()]

    def attend():
        return rmfa(*tensors, features, is_causal=is_causal, implementation="triton")

    compiled = torch.compile(attend, fullgraph=True)
    (got, got_grads), (right, right_grads) = (gradients(f, inputs) for f in (compiled, attend))
    for a, b in zip([got, *got_grads], [right, *right_grads], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@BOTH
def test_auto_takes_the_kernels(is_causal):
    features = make_trained("unbiased", 64, 128)
    tensors = [x.to(DEVICE) for x in draw(300, 300, heads=2, dim=64, dtype=torch.bfloat16)]
    auto, triton, eager = (
        rmfa(*tensors, features, is_causal=is_causal, implementation=i) for i in ("auto", "triton", "eager")
    )
    assert torch.equal(auto, triton)
    assert not torch.equal(auto, eager)
