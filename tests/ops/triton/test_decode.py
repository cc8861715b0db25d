"""The fused decode step: in the interpreter, and on a GPU if there is one."""

import pytest
import torch
from ops.triton.specification import DEVICE, TOLERANCE, relative_error
from oracle import make_map, rows

from schoenbat import RMFAState, rmfa, rmfa_step
from schoenbat.functional import step
from schoenbat.ops.unit_rows import UnitRows

pytest.importorskip("triton")


def decode(features, tensors, implementation, state_dtype=torch.float32, mask=None, **options):
    """All outputs of a sequence, token by token, and the last state."""
    query, key, value = tensors
    shape = key.shape[0], key.shape[1], value.shape[-1]
    state = RMFAState.zeros(features, *shape, device=DEVICE, dtype=state_dtype)
    outputs = []
    for i in range(query.shape[-2]):
        token = [x[..., i : i + 1, :] for x in tensors]
        key_mask = None if mask is None else mask[:, i : i + 1]
        out, state = step(
            *token,
            features,
            state,
            key_mask=key_mask,
            enable_gqa=True,
            implementation=implementation,
            **options,
        )
        outputs.append(out)
    return torch.cat(outputs, dim=-2), state


def assert_decodes(features, tensors, mask=None, **options):
    scale = torch.linspace(0.5, 2.5, tensors[0].shape[1], device=DEVICE)
    tensors = [x.to(DEVICE) for x in tensors]
    got, state = decode(features, tensors, "triton", mask=mask, scale=scale, **options)
    exact = [x.double() for x in tensors]
    options["scale"] = scale.double()
    right, right_state = decode(features, exact, "eager", torch.float64, mask, **options)
    assert got.dtype == tensors[0].dtype
    assert relative_error(got, right) < TOLERANCE[got.dtype]
    for a, b in zip(vars(state).values(), vars(right_state).values(), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
def test_matches_the_specification(construction, dtype):
    features = make_map(construction, 16, 40, dtype=torch.float32, device=DEVICE)
    assert_decodes(features, [rows(2, 2, 3, 16, seed=i, dtype=dtype) for i in range(3)])


def test_masks_groups_and_maps_per_head():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, num_heads=2)
    shapes = (6, 16), (2, 16), (2, 40)
    tensors = [rows(2, h, 4, d, seed=i, dtype=torch.float32) for i, (h, d) in enumerate(shapes)]
    mask = torch.tensor([[False, True, False, True], [False, False, True, True]], device=DEVICE)
    for x in tensors[1:]:
        x[0, :, 0] = torch.nan
    exact = [torch.nan_to_num(x) for x in tensors]
    got, _ = decode(features, [x.to(DEVICE) for x in tensors], "triton", mask=mask)
    right, _ = decode(features, [x.to(DEVICE) for x in exact], "reference", mask=mask)
    torch.testing.assert_close(got, right)
    assert not got[:, :, 0].any()
    assert_decodes(features, exact, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("centred", "heads"), [(True, 1), (True, 3), (False, 1)])
def test_rows_are_normalised_on_the_way(centred, heads, dtype):
    """A row of zeros, one below the least norm, long ones; a key that is masked and NaN."""
    features = make_map("exact-low", 20, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = (rows(1, h, 4, 20, seed=i, dtype=dtype) for i, h in enumerate((heads, 1, 1)))
    query, key = 3 * query + 0.5, 3 * key + 0.5
    query[..., 1, :], key[..., 2, :] = 0.0, 0.0
    query[..., 2, :] *= 1e-3
    mask = torch.tensor([[False, True, True, True]], device=DEVICE)
    options = {"mask": mask, "unit_rows": UnitRows(centred, 1e-3)}
    assert_decodes(features, [query, key, value], **options)
    tensors = [x.to(DEVICE) for x in (query, key, value)]
    right, _ = decode(features, tensors, "triton", **options)
    tensors[1][..., 0, :] = torch.nan
    assert torch.equal(decode(features, tensors, "triton", **options)[0], right)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"),
    [(20, 24, 300), (20, 24, 10), (5, 3, 2), (16, 16, 17), (16, 131, 30)],
)
def test_widths_that_divide_nothing(head_dim, value_dim, num_features):
    features = make_map("exact-low", head_dim, num_features, dtype=torch.float32, device=DEVICE)
    widths = head_dim, head_dim, value_dim
    assert_decodes(features, [rows(1, 1, 2, d, seed=i, dtype=torch.float32) for i, d in enumerate(widths)])


def test_the_state_before_is_left_as_it_is():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    x = rows(1, 1, 1, 16, dtype=torch.float32).to(DEVICE)
    state = RMFAState.zeros(features, 1, 1, 16, device=DEVICE)
    _, after = rmfa_step(x, x, x, features, state, implementation="triton")
    assert not any(tensor.any() for tensor in vars(state).values())
    assert all(tensor.any() for tensor in vars(after).values())


def test_goes_on_from_a_prompt():
    features = make_map("unbiased", 16, 40, dtype=torch.float32, device=DEVICE)
    tensors = [rows(1, 2, 6, 16, seed=i, dtype=torch.float32).to(DEVICE) for i in range(3)]
    state = RMFAState.zeros(features, 1, 2, 16, device=DEVICE)
    _, state = rmfa_step(*(x[..., :5, :] for x in tensors), features, state)
    last, _ = rmfa_step(*(x[..., 5:, :] for x in tensors), features, state, implementation="triton")
    torch.testing.assert_close(last, rmfa(*tensors, features, is_causal=True)[..., 5:, :])


def test_an_active_floor():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE, scale=2.0)
    shift = rows(1, 1, 1, 16, seed=8, dtype=torch.float32)
    query, key, value = (rows(1, 1, 4, 16, seed=i, dtype=torch.float32) for i in range(3))
    assert_decodes(features, [query + shift, key - shift, value])


def test_operator_is_well_formed():
    from schoenbat.ops.triton import library
    from schoenbat.ops.triton.plan import make_plan

    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    feature_map = features.map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, torch.float32, 16)
    x = [rows(1, 1, 1, 1, 16, seed=i, dtype=torch.float32).to(DEVICE) for i in range(3)]
    state = RMFAState.zeros(features, 1, 1, 16, device=DEVICE)
    scale, count = torch.ones(1, 1, 1, 1, device=DEVICE), state.count.view(-1, 1, 1, 1, 1)
    small = plan.tensors, feature_map.coefficients, scale, plan.flags, 1.2, 2, 1e-13
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        library.step.operator, (*x, None, count, list(state._sums()), *small), test_utils=checks
    )


def test_what_it_does_not_do_raises():
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    x = rows(1, 2, 1, 16, dtype=torch.float32).to(DEVICE)
    state = RMFAState.zeros(features, 1, 2, 16, device=DEVICE, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float32 state"):
        rmfa_step(x, x, x, features, state, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
@pytest.mark.parametrize(("head_dim", "num_features"), [(64, 128), (128, 256)])
def test_matches_the_specification_on_a_gpu(construction, dtype, head_dim, num_features):
    features = make_map(construction, head_dim, num_features, dtype=torch.float32, device=DEVICE)
    shapes = (8, head_dim), (2, head_dim), (2, head_dim)
    assert_decodes(features, [rows(3, h, 20, d, seed=i, dtype=dtype) for i, (h, d) in enumerate(shapes)])


@pytest.mark.gpu
def test_auto_takes_the_kernel_unless_gradients_are_wanted():
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [rows(2, 4, 1, 64, seed=i, dtype=torch.bfloat16).to(DEVICE) for i in range(3)]
    state = RMFAState.zeros(features, 2, 4, 64, device=DEVICE)
    outputs = {
        name: rmfa_step(*tensors, features, state, implementation=name)[0] for name in ("auto", "triton")
    }
    assert torch.equal(outputs["auto"], outputs["triton"])
    tensors[0].requires_grad_()
    rmfa_step(*tensors, features, state)[0].sum().backward()
    assert tensors[0].grad.any()
