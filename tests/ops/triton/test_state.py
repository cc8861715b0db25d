"""States by fused kernels: in the interpreter, and on a GPU if there is one."""

import pytest
import torch
from ops.triton.specification import DEVICE, DTYPES, TOLERANCE, assert_a_graph_replays, relative_error
from oracle import gradients, make_map, poisoned_memory, rows

from schoenbat import RMFAState, rmfa, rmfa_step

pytest.importorskip("triton")


def draw(length, dim=12, value_dim=20, heads=4, key_heads=2, batch=2, dtype=torch.float32, mean=1.0):
    """Values have a mean: nothing is lost to it."""
    shapes = (heads, length, dim), (key_heads, length, dim), (key_heads, length, value_dim)
    query, key, value = (rows(batch, *shape, seed=i) for i, shape in enumerate(shapes))
    return [x.to(DEVICE, dtype) for x in (query, key, value + mean)]


def in_pieces(query, key, value, features, scale, mask, ends, is_causal, implementation):
    """The output of a sequence that arrives in pieces, which end where `ends` says."""
    shape = key.shape[0], key.shape[1], value.shape[-1]
    state = RMFAState.zeros(features, *shape, device=DEVICE, dtype=key.dtype)
    outputs = []
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        q, k, v = (x[..., start:end, :] for x in (query, key, value))
        options = {"key_mask": None if mask is None else mask[:, start:end], "implementation": implementation}
        if is_causal:
            out, state = rmfa_step(q, k, v, features, state, scale=scale, enable_gqa=True, **options)
            outputs.append(out)
        else:
            state.update(k, v, features, **options)
    if is_causal:
        return torch.cat(outputs, dim=-2)
    return state.read(query, features, scale, implementation=implementation)


def assert_pieces_make_the_whole(
    features, tensors, ends, is_causal, mask=None, exact="reference", magnified=1.0
):
    """Outputs and all gradients, against one call in float64; `magnified`: how much more rounding shows."""
    scale = torch.linspace(0.5, 2.5, tensors[0].shape[1], device=DEVICE)
    inputs = [x.requires_grad_() for x in (*tensors, scale)]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    options = {"key_mask": mask, "is_causal": is_causal, "enable_gqa": True, "implementation": exact}

    def pieces():
        query, key, value, scale = inputs
        return in_pieces(query, key, value, features, scale, mask, ends, is_causal, "triton")

    def whole():
        query, key, value, scale = exact_inputs
        return rmfa(query, key, value, features, scale=scale, **options)

    with poisoned_memory():
        got, got_grads = gradients(pieces, inputs)
    right, right_grads = gradients(whole, exact_inputs)
    assert got.dtype == tensors[0].dtype
    errors = [relative_error(a, b) for a, b in zip([got, *got_grads], [right, *right_grads], strict=True)]
    assert all(error < magnified * TOLERANCE[got.dtype] for error in errors), errors


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("construction", "dtype"),
    [
        ("exact-low", torch.float32),
        ("exact-low", torch.float16),
        ("unbiased", torch.float16),
    ],
)
def test_pieces_make_the_whole(few_programs, construction, dtype, is_causal):
    """Of one token, of several tiles and of nothing."""
    features = make_map(construction, 12, 40, dtype=torch.float32, device=DEVICE)
    tensors = draw(37, heads=1, key_heads=1, batch=1, dtype=dtype)
    assert_pieces_make_the_whole(features, tensors, (1, 19, 19, 37), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_groups_and_maps_per_head(is_causal):
    """A sequence whose first piece is masked, and one that has no other keys."""
    features = make_map("exact-low", 12, 40, dtype=torch.float32, device=DEVICE, num_heads=2)
    mask = (torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) > 0.4).to(DEVICE)
    mask[0, :5], mask[1] = False, False
    assert_pieces_make_the_whole(features, draw(12), (5, 12), is_causal, mask)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"), [(20, 24, 10), (16, 3, 17), (130, 24, 150), (12, 131, 30)]
)
def test_widths_that_divide_nothing(head_dim, value_dim, num_features, is_causal):
    """Projected linear features; none but identities; an identity that is spelt out; values in parts."""
    features = make_map("exact-low", head_dim, num_features, dtype=torch.float32, device=DEVICE)
    # Gradients of scores add up over columns, whose mean cancels only afterwards.
    mean = min(1.0, 20 / value_dim)
    tensors = draw(18, head_dim, value_dim, heads=1, key_heads=1, batch=1, mean=mean)
    assert_pieces_make_the_whole(features, tensors, (7, 18), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_active_floor_has_gradients(is_causal):
    features = make_map("exact-low", 12, 40, dtype=torch.float32, device=DEVICE, scale=2.0)
    query, key, value = draw(24, heads=1, key_heads=1, batch=1)
    shift = rows(1, 1, 1, 12, seed=8, dtype=torch.float32).to(DEVICE)
    assert_pieces_make_the_whole(features, [query + shift, key - shift, value - 1], (11, 24), is_causal)


def test_the_state_is_that_of_the_eager_functions():
    features = make_map("unbiased", 12, 40, dtype=torch.float32, device=DEVICE)
    _, key, value = draw(9)
    states = []
    for implementation in ("eager", "triton"):
        state = RMFAState.zeros(features, 2, 2, 20, device=DEVICE)
        state.update(key, value, features, implementation=implementation)
        _, state = rmfa_step(key, key, value, features, state, implementation=implementation)
        states.append(vars(state))
    eager, fused = states
    # Sums may cancel: what is rounded is their terms, whatever is left of them.
    assert torch.equal(eager.pop("count"), fused.pop("count"))
    assert all(relative_error(fused[name], eager[name]) < TOLERANCE[torch.float32] for name in eager)


def test_a_feature_without_weight_does_no_harm():
    features = make_map("unbiased", 12, 40, dtype=torch.float32, device=DEVICE)
    features.feature_weights[..., -3:] = 0.0
    assert_pieces_make_the_whole(features, draw(9, heads=1, key_heads=1, batch=1), (4, 9), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_large_values_stay_in_the_range_of_half_precision(few_programs, is_causal):
    """Sums of 70 values of 1,000 would not."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    query, _, value = draw(90, 16, 16, heads=1, key_heads=1, batch=1, dtype=torch.float16)
    row = query[..., :1, :].expand(query.shape)
    inputs = [x.contiguous().requires_grad_() for x in (row, row, 1000 * value.abs())]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    got, grads = gradients(
        lambda: in_pieces(*inputs, features, None, None, (70, 90), is_causal, "triton"), inputs
    )
    right, right_grads = gradients(lambda: rmfa(*exact_inputs, features, is_causal=is_causal), exact_inputs)
    for a, b in zip([got, grads[2]], [right, right_grads[2]], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.float16]
    assert all(grad.isfinite().all() for grad in grads)


def test_a_large_mean_is_not_rounded_with():
    """Gradients of keys do not know the mean of the values; rounding S'v with it would show."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = draw(40, 16, 16, heads=1, key_heads=1, batch=1, dtype=torch.float16)
    value = value.round(decimals=1) + 63.0  # as exact as they were
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    _, grads = gradients(lambda: in_pieces(*inputs, features, None, None, (23, 40), False, "triton"), inputs)
    _, right = gradients(lambda: rmfa(*exact_inputs, features), exact_inputs)
    assert relative_error(grads[1], right[1]) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_backward_pass_under_autocast_is_not_rounded(is_causal):
    """The mean of the values would show."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    inputs = [x.requires_grad_() for x in draw(12, 16, 16, heads=1, key_heads=1, batch=1, mean=30.0)]
    out = in_pieces(*inputs, features, None, None, (5, 12), is_causal, "triton")
    grad = rows(*out.shape, seed=7, dtype=torch.float32).to(DEVICE)
    right = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_map_of_constants_alone(is_causal):
    features = make_map("paper", 16, 2, dtype=torch.float32, device=DEVICE, seed=1)
    assert features.degrees == (0, 0)
    tensors = draw(12, 16, 16, heads=1, key_heads=1, batch=1)
    assert_pieces_make_the_whole(features, tensors, (5, 12), is_causal)


def test_operators_are_well_formed():
    from schoenbat.ops.triton import library
    from schoenbat.ops.triton.plan import make_plan

    features = make_map("exact-low", 12, 40, dtype=torch.float32, device=DEVICE)
    feature_map = features.map(torch.float32)
    plan = make_plan(feature_map.blocks, feature_map.weight, torch.float32, 16)
    x = [rows(1, 1, 1, 5, 12, seed=i, dtype=torch.float32).to(DEVICE).requires_grad_() for i in range(3)]
    state = RMFAState.zeros(features, 1, 1, 12, device=DEVICE).update(x[1][0], x[2][0], features)
    sums = [s.detach().requires_grad_() for s in state._sums()]
    scale = torch.ones(1, 1, 1, 1, device=DEVICE, requires_grad=True)
    small = plan.tensors, feature_map.coefficients, scale, plan.flags
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    calls = [
        (library.summarize, (*x[1:], None, plan.tensors, plan.flags, 1.2, 2, 1e-13)),
        (library.read, (x[0], sums, state.count, *small)),
        (library.attend_causal, (*x, None, None, sums, state.count, small[0], [], *small[1:], 1.2, 2, 1e-13)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator.operator, arguments, test_utils=checks)


def test_what_it_does_not_do_raises():
    features = make_map("exact-low", 12, 40, dtype=torch.float32, device=DEVICE)
    query, key, value = draw(3, heads=2)
    state = RMFAState.zeros(features, 2, 2, 20, device=DEVICE)
    with pytest.raises(NotImplementedError, match="'reference' looks at all pairs"):
        state.update(key, value, features, implementation="reference")
    with pytest.raises(NotImplementedError, match="'reference' looks at all pairs"):
        state.read(query, features, implementation="reference")
    with pytest.raises(NotImplementedError, match="float64"):
        state.update(key.double(), value.double(), features, implementation="triton")
    state = RMFAState.zeros(features, 2, 2, 20, device=DEVICE, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float32 state"):
        state.read(query, features, implementation="triton")
    with pytest.raises(NotImplementedError, match="float32 state"):
        rmfa_step(query, key, value, features, state, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper"])
def test_pieces_make_the_whole_on_a_gpu(construction, dtype, is_causal):
    """Causal kernels round values with their mean, 8 times as large as what is left of them without."""
    features = make_map(construction, 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = draw(5000, 64, 64, dtype=dtype, mean=0.0 if is_causal else 1.0)
    mask = (torch.rand(2, 5000, generator=torch.Generator().manual_seed(0)) > 0.3).to(DEVICE)
    # Sums of float32 are rounded before they are centred, those of 16 bits after it.
    magnified = 8.0 if dtype == torch.float32 and not is_causal else 1.0
    ends = 700, 2900, 5000
    assert_pieces_make_the_whole(features, tensors, ends, is_causal, mask, "eager", magnified)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "num_features"),
    [(32, 24, 64), (32, 32, 128), (64, 32, 128), (80, 128, 512), (64, 64, 512), (64, 192, 128)],
)
def test_every_width_on_a_gpu(construction, head_dim, value_dim, num_features, is_causal):
    features = make_map(construction, head_dim, num_features, dtype=torch.float32, device=DEVICE)
    tensors = draw(1500, head_dim, value_dim, dtype=torch.bfloat16, mean=0.0 if is_causal else 1.0)
    assert_pieces_make_the_whole(features, tensors, (600, 1500), is_causal, exact="eager")


@pytest.mark.gpu
def test_auto_takes_the_kernels():
    features = make_map("unbiased", 64, 128, dtype=torch.float32, device=DEVICE)
    query, key, value = draw(300, 64, 64, dtype=torch.bfloat16)
    for is_causal in (False, True):
        auto, triton, eager = (
            in_pieces(query, key, value, features, None, None, (100, 300), is_causal, name)
            for name in ("auto", "triton", "eager")
        )
        assert torch.equal(auto, triton)
        assert not torch.equal(auto, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_compiles_to_one_graph(is_causal):
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.requires_grad_() for x in draw(500, 64, 64, dtype=torch.bfloat16)]

    def attend():
        return in_pieces(*tensors, features, None, None, (200, 500), is_causal, "triton")

    compiled = torch.compile(attend, fullgraph=True)
    (got, got_grads), (right, right_grads) = (gradients(f, tensors) for f in (compiled, attend))
    for a, b in zip([got, *got_grads], [right, *right_grads], strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_graph_of_it_replays(is_causal):
    features = make_map("exact-low", 64, 128, dtype=torch.float32, device=DEVICE)
    tensors = [x.requires_grad_() for x in draw(500, 64, 64, dtype=torch.bfloat16)]
    pieces = features, None, None, (200, 500), is_causal, "triton"
    assert_a_graph_replays(lambda: in_pieces(*tensors, *pieces), tensors)
