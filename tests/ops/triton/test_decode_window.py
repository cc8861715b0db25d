"""The fused decoding step of exact near, linear far: in the interpreter, and on a GPU if there is one."""

import pytest
import torch
from ops.triton.specification import DEVICE, TOLERANCE, relative_error
from ops.triton.test_window import draw, near_identity
from oracle import make_map, poisoned_memory, rows
from torch.profiler import profile

from schoenbat import RMFAWindowState, SchoenbAt, rmfa_window, rmfa_window_step
from schoenbat.inputs import arrange, map_for
from schoenbat.ops import window_fused
from schoenbat.ops.unit_rows import UnitRows
from schoenbat.windowed import step

pytest.importorskip("triton")


def empty_state(features, tensors, width, dtype=torch.float32):
    _, key, value = tensors
    shape = key.shape[0], key.shape[1], value.shape[-1]
    return RMFAWindowState.zeros(features, width, *shape, device=DEVICE, dtype=dtype)


def decode(features, tensors, state, implementation, mask=None, attention=rmfa_window_step, **options):
    """All outputs of a sequence, token by token, and the last state."""
    outputs = []
    for i in range(tensors[0].shape[-2]):
        token = [x[..., i : i + 1, :] for x in tensors]
        options["key_mask"] = None if mask is None else mask[:, i : i + 1]
        out, state = attention(
            *token, features, state, enable_gqa=True, implementation=implementation, **options
        )
        outputs.append(out)
    return torch.cat(outputs, dim=-2), state


def in_double(options):
    return {
        name: tuple(x.double() for x in given) if isinstance(given, tuple) else given.double()
        for name, given in options.items()
    }


def assert_decodes(features, tensors, width, mask=None, prompt=0, far_maps=None, roundings=1.0):
    """Outputs as those of the whole sequence by the specification, and the state as the eager one.

    The first tokens, a `prompt`, are for the eager path; in float32, for its sums are to be exact.
    """
    heads, tensors = tensors[0].shape[1], [x.to(DEVICE) for x in tensors]
    options = {"scale": torch.linspace(0.5, 2.5, heads), "far_weight": torch.linspace(0.4, 2.0, heads)}
    options = {name: x.to(DEVICE) for name, x in options.items()}
    if far_maps is not None:
        options["far_maps"] = tuple(x.to(DEVICE) for x in far_maps)
    state, rest = empty_state(features, tensors, width), mask
    if prompt:
        first = [x[..., :prompt, :].float() for x in tensors]
        masked = None if mask is None else mask[:, :prompt]
        _, state = rmfa_window_step(*first, features, state, key_mask=masked, enable_gqa=True, **options)
        rest = None if mask is None else mask[:, prompt:]
    with poisoned_memory():
        got, state = decode(features, [x[..., prompt:, :] for x in tensors], state, "triton", rest, **options)
    assert got.dtype == state.key.dtype == state.value.dtype == tensors[0].dtype

    exact, options = [x.double() for x in tensors], in_double(options)
    shared = {"key_mask": mask, "enable_gqa": True, **options}
    right = rmfa_window(*exact, features, width, is_causal=True, implementation="reference", **shared)
    tolerance = roundings * TOLERANCE[got.dtype]
    assert relative_error(got, right[..., prompt:, :]) < tolerance
    start = empty_state(features, exact, width, torch.float64)
    _, right_state = rmfa_window_step(*exact, features, start, **shared)
    assert torch.equal(state.mask, right_state.mask)
    assert torch.equal(state.key, right_state.key.to(state.key.dtype))
    assert torch.equal(state.value, right_state.value.to(state.value.dtype))
    # Sums of 16-bit rows are exact to float32, unless a matrix came first.
    tolerance = TOLERANCE[torch.float32] if far_maps is None else tolerance
    for a, b in zip(vars(state.far).values(), vars(right_state.far).values(), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
def test_matches_the_specification(construction, dtype):
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE)
    assert_decodes(features, draw(5, dtype=dtype), 2)


@pytest.mark.parametrize(("width", "length", "prompt"), [(0, 3, 0), (1, 4, 0), (9, 3, 0), (33, 42, 40)])
def test_windows_of_every_width(width, length, prompt):
    """None; one key; wider than what there is; wider than a tile, after a prompt."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    assert_decodes(features, draw(length), width, prompt=prompt)


@pytest.mark.parametrize("width", [0, 2])
def test_masks_groups_and_maps_of_all_kinds(width):
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, num_heads=2)
    tensors = draw(5, heads=6, key_heads=2, value_dim=20)
    mask = torch.tensor([[False, True, False, True, True]], device=DEVICE)
    assert_decodes(features, tensors, width, mask, far_maps=tuple(near_identity((6, 2), 16).values()))


def test_what_is_masked_may_be_nan():
    """And a row that sees no key is zero."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(4, batch=2)]
    mask = torch.tensor([[False, False, True, True], [False, True, False, True]], device=DEVICE)
    for x in tensors[1:]:
        x[~mask[:, None]] = torch.nan
    maps = tuple(x.to(DEVICE) for x in near_identity((1, 1), 16).values())
    got, state = decode(features, tensors, empty_state(features, tensors, 1), "triton", mask, far_maps=maps)
    exact = [torch.nan_to_num(x) for x in tensors]
    right = rmfa_window(*exact, features, 1, key_mask=mask, is_causal=True, far_maps=maps)
    torch.testing.assert_close(got, right)
    assert not got[:, :, 0].any()
    assert state.count.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"), [(20, 24, 90), (5, 3, 2), (16, 70, 17), (16, 131, 30)]
)
def test_widths_that_divide_nothing(head_dim, value_dim, num_features):
    """Several groups of features; projected linear ones; values for two programs, and for more."""
    features = make_map("exact-low", head_dim, num_features, dtype=torch.float32, device=DEVICE)
    assert_decodes(features, draw(3, dim=head_dim, value_dim=value_dim), 1)


def test_an_active_floor():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, scale=2.0)
    shift = rows(1, 1, 1, 16, seed=8, dtype=torch.float32)
    query, key, value = draw(5)
    assert_decodes(features, [query + shift, key - shift, value], 1)


def test_one_scale_and_one_weight_for_all_heads():
    """And numbers that are not side by side."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(2, heads=2)]
    one, every_second = torch.tensor([1.5], device=DEVICE), torch.tensor([0.5, 9.0, 2.0], device=DEVICE)[::2]
    for options in (
        {"scale": one, "far_weight": one},
        {"scale": every_second, "far_weight": every_second},
    ):
        got, _ = decode(features, tensors, empty_state(features, tensors, 0), "triton", **options)
        right = rmfa_window(*tensors, features, 0, is_causal=True, **options, implementation="reference")
        assert relative_error(got, right) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("centred", "width", "mapped"), [(False, 2, False), (True, 2, True), (True, 0, False)]
)
def test_rows_are_normalised_inside(centred, width, mapped):
    features = make_map("unbiased", 20, 40, dtype=torch.float32, device=DEVICE)
    tensors, unit_rows = [(3 * x + 1).to(DEVICE) for x in draw(4, dim=20)], UnitRows(centred, 1e-13)
    maps = tuple(x.to(DEVICE) for x in near_identity((1, 1), 20).values()) if mapped else None
    options = {"scale": 2.0, "far_weight": 0.5, "far_maps": maps}
    state = empty_state(features, tensors, width)
    got, state = decode(features, tensors, state, "triton", attention=step, unit_rows=unit_rows, **options)
    query, key, value = (x.double() for x in tensors)
    query, key = unit_rows(query), unit_rows(key)
    options["far_maps"] = None if maps is None else tuple(x.double() for x in maps)
    right = rmfa_window(query, key, value, features, width, is_causal=True, **options)
    assert relative_error(got, right) < TOLERANCE[torch.float32]
    assert relative_error(state.key, key[..., 4 - width :, :]) < TOLERANCE[torch.float32]


def test_the_state_before_is_left_as_it_is():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(3)]
    _, before = rmfa_window_step(*tensors, features, empty_state(features, tensors, 2))
    tensors_of = lambda state: [state.key, state.value, state.mask, *vars(state.far).values()]  # noqa: E731
    kept = [x.clone() for x in tensors_of(before)]
    token = [x[..., :1, :] for x in tensors]
    _, after = rmfa_window_step(*token, features, before, implementation="triton")
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(before), kept, strict=True))
    assert before.count.item() == 3
    assert after.count.item() == 4


def arguments(dtype=torch.float32):
    """Of `window_fused.step`."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(1, dtype=dtype)]
    inputs, ones = arrange(*tensors, None, False), torch.ones(1, 1, 1, 1, device=DEVICE)
    before = empty_state(features, tensors, 3)._remembered()
    return *inputs[:4], before, map_for(features, inputs.key), ones, ones, None, UnitRows(True, 1e-13)


def test_under_autocast_both_paths_leave_the_same_state():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(5)]
    states = []
    for implementation in ("eager", "triton"):
        with torch.autocast(DEVICE, torch.float16), torch.no_grad():
            states.append(decode(features, tensors, empty_state(features, tensors, 3), implementation)[1])
    eager, fused = states
    assert eager.key.dtype == fused.key.dtype == eager.value.dtype == fused.value.dtype == torch.float16
    assert torch.equal(eager.key, fused.key)
    assert torch.equal(eager.value, fused.value)
    torch.testing.assert_close(fused.far.feature_value, eager.far.feature_value)


def test_nothing_is_computed_beside_the_kernel():
    """What costs on a GPU is not this arithmetic but the launches."""
    given = arguments(torch.float16)
    window_fused.step(*given)
    with profile() as profiled:
        window_fused.step(*given)
    beside = {event.name for event in profiled.events() if event.cpu_parent is None}
    launched = {name for name in beside if name.startswith(("aten::", "schoenbat::"))}
    assert launched == {"schoenbat::triton_step_window"}


@pytest.mark.parametrize("separate", [False, True])
def test_operator_is_well_formed(separate):
    from schoenbat.ops.triton import library_window
    from schoenbat.ops.triton.plan import make_plan

    query, key, value, mask, before, feature_map, *_ = arguments()
    plan = make_plan(feature_map.blocks, feature_map.weight, torch.float32, 16)
    ones, far = torch.ones(1, 1, 1, 1, device=DEVICE), [query.clone(), key.clone()] if separate else []
    small = plan.tensors, feature_map.coefficients, ones, ones, plan.flags, 1.2, 0, 0.0
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = query, key, value, mask, far, list(before[:3]), before.far.seen, list(before.far.sums), *small
    torch.library.opcheck(library_window.step.operator, given, test_utils=checks)


def test_what_it_does_not_do_raises():
    features, (query, key, value) = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE), draw(2)
    tensors = [x.to(DEVICE) for x in (query, key, value)]
    state, double = (empty_state(features, tensors, 2, dtype) for dtype in (torch.float32, torch.float64))
    with pytest.raises(NotImplementedError, match="one token at a time; use"):
        rmfa_window_step(*tensors, features, state, implementation="triton")
    token = [x[..., :1, :] for x in tensors]
    with pytest.raises(NotImplementedError, match="float32 state"):
        rmfa_window_step(*token, features, double, implementation="triton")
    with pytest.raises(NotImplementedError, match="'reference' looks at all pairs"):
        rmfa_window_step(*token, features, state, implementation="reference")
    weight = torch.ones(1, device=DEVICE, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradients"):
        rmfa_window_step(*token, features, state, implementation="triton", far_weight=weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
@pytest.mark.parametrize(("head_dim", "num_features"), [(64, 128), (128, 256)])
@pytest.mark.parametrize(("heads", "width"), [(2, 64), (8, 5), (8, 100)])
def test_matches_the_specification_on_a_gpu(construction, dtype, head_dim, num_features, heads, width):
    features = make_map(construction, head_dim, num_features, dtype=torch.float32, device=DEVICE)
    tensors = draw(150, heads=heads, key_heads=2, dim=head_dim, dtype=dtype, batch=3)
    mask = torch.rand(3, 150, generator=torch.Generator().manual_seed(0)) > 0.3
    assert_decodes(features, tensors, width, mask.to(DEVICE), prompt=130)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"), [(16, 16, 64), (32, 48, 128), (80, 128, 512), (128, 40, 256)]
)
@pytest.mark.parametrize(("heads", "separate"), [(2, False), (4, True)])
def test_every_width_on_a_gpu(head_dim, value_dim, num_features, heads, separate):
    features = make_map("exact-low", head_dim, num_features, dtype=torch.float32, device=DEVICE)
    shape = {"heads": heads, "key_heads": 2, "dim": head_dim, "value_dim": value_dim, "dtype": torch.bfloat16}
    maps = tuple(near_identity((heads, 2), head_dim).values()) if separate else None
    # Rows that are multiplied by a matrix first are rounded once more.
    assert_decodes(features, draw(90, **shape), 33, prompt=80, far_maps=maps, roundings=1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("normalization", ["token", "l2", None])
def test_modules_decode_with_it(normalization, dtype):
    module = SchoenbAt(
        64, 4, 128, construction="exact-low", normalization=normalization, window=20, scale=2.0
    )
    module = module.eval().to(DEVICE)
    tensors, state, outputs = [x.to(DEVICE) for x in draw(60, heads=4, dim=64, dtype=dtype)], None, []
    with torch.no_grad():
        for i in range(60):
            out, state = module.step(*(x[..., i : i + 1, :] for x in tensors), state)
            outputs.append(out)
        right = module.double()(*(x.double() for x in tensors), is_causal=True)
    assert relative_error(torch.cat(outputs, dim=-2), right) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
def test_compiles_to_one_graph(construction):
    module = SchoenbAt(64, 4, 128, construction=construction, window=20).eval().to(DEVICE)
    tokens = [x.to(DEVICE) for x in draw(40, heads=4, dim=64, dtype=torch.bfloat16)]
    with torch.no_grad():
        _, state = module.step(*(x[..., :39, :] for x in tokens), None)
        token = [x[..., 39:, :] for x in tokens]
        right, right_state = module.step(*token, state)
        got, got_state = torch.compile(module.step, fullgraph=True)(*token, state)
    assert relative_error(got, right) < TOLERANCE[torch.bfloat16]
    assert (
        relative_error(got_state.far.feature_value, right_state.far.feature_value) < TOLERANCE[torch.float32]
    )
    assert torch.equal(got_state.mask, right_state.mask)


@pytest.mark.gpu
def test_a_graph_of_it_replays():
    """Nothing waits for the device, and nothing is made anew: a CUDA graph gives what a call gives."""
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(1, heads=4, dim=64, dtype=torch.bfloat16)]
    state = empty_state(features, tensors, 16)
    with torch.no_grad():
        right, _ = rmfa_window_step(*tensors, features, state, implementation="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got, _ = rmfa_window_step(*tensors, features, state, implementation="triton")
    got.zero_()
    graph.replay()
    assert torch.equal(got, right)


@pytest.mark.gpu
def test_auto_takes_the_kernel_unless_gradients_are_wanted():
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.to(DEVICE) for x in draw(30, heads=4, dim=64, dtype=torch.bfloat16)]
    _, state = rmfa_window_step(*tensors, features, empty_state(features, tensors, 8))
    token = [x[..., :1, :].clone() for x in tensors]
    outputs = {
        name: rmfa_window_step(*token, features, state, implementation=name)[0]
        for name in ("auto", "triton", "eager")
    }
    assert torch.equal(outputs["auto"], outputs["triton"])
    assert relative_error(outputs["triton"], outputs["eager"]) < TOLERANCE[torch.bfloat16]
    token[0].requires_grad_()
    rmfa_window_step(*token, features, state)[0].sum().backward()
    assert token[0].grad.any()
