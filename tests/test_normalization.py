"""Pre-SBN and post-SBN against their formulas, with masks, in all modes and precisions."""

import copy
import math

import pytest
import torch
from torch.nn.functional import normalize

from schoenbat import PostSBN, PreSBN

HEADS, WIDTH = 3, 8
MODES = ["token", "batch", "l2"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def make(mode, **options) -> PreSBN:
    return PreSBN(mode, HEADS, WIDTH, **options)


def inputs(batch=4, length=10, dtype=torch.float64) -> torch.Tensor:
    """Rows whose mean and spread differ from channel to channel."""
    offset, spread = torch.randn(2, HEADS, 1, WIDTH, dtype=dtype)
    return offset + (0.5 + spread.abs()) * torch.randn(batch, HEADS, length, WIDTH, dtype=dtype)


def ragged_mask(batch=4, length=10) -> torch.Tensor:
    """Left padding, right padding, holes, and a row of padding only."""
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, 7:] = False
    mask[1, :4] = False
    mask[2] = torch.arange(length) % 3 == 0
    mask[3] = False
    return mask


def chosen(x, mask) -> torch.Tensor:
    """The rows that take part, ``(H, rows, d)``."""
    return torch.cat([row[:, keep] for row, keep in zip(x, mask, strict=True)], dim=1)


def test_token_is_the_row_less_its_mean_over_its_norm():
    x = inputs()
    centred = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(make("token")(x), centred / centred.norm(dim=-1, keepdim=True))


def test_token_equals_standardising_the_channels_first():
    """The paper's formula: σ cancels against the norm."""
    x = inputs()
    standard = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, unbiased=False)
    torch.testing.assert_close(make("token")(x), normalize(standard, dim=-1))


def test_l2_divides_by_the_norm_only():
    x = inputs()
    torch.testing.assert_close(make("l2")(x), x / x.norm(dim=-1, keepdim=True))


def test_l2_commutes_with_a_rotation():
    x = inputs()
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64)).Q
    torch.testing.assert_close(make("l2")(x @ rotation), make("l2")(x) @ rotation)


def test_batch_standardises_each_head_and_channel_and_then_the_row():
    x = inputs()
    standard = (x - x.mean((0, 2), keepdim=True)) / x.var((0, 2), keepdim=True, unbiased=False).sqrt()
    torch.testing.assert_close(make("batch").double()(x), normalize(standard, dim=-1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, HEADS, 5, WIDTH), (4, HEADS, 1, WIDTH), (2, HEADS, 6, WIDTH)])
def test_rows_have_norm_one(mode, shape):
    out = make(mode)(torch.randn(shape) * 100)
    torch.testing.assert_close(out.norm(dim=-1), torch.ones(shape[:-1]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["token", "l2"])
def test_row_norms_need_neither_heads_nor_a_batch(mode):
    x = inputs()
    out = make(mode)(x)
    torch.testing.assert_close(PreSBN(mode)(x), out)
    torch.testing.assert_close(PreSBN(mode)(x[0, 0, 0]), out[0, 0, 0])
    assert not PreSBN(mode).state_dict()


@pytest.mark.parametrize("mode", ["token", "l2"])
def test_row_norms_are_scale_invariant_and_ignore_masks(mode):
    x = inputs()
    torch.testing.assert_close(make(mode)(1e-3 * x), make(mode)(x))
    assert torch.equal(make(mode)(x, ragged_mask()), make(mode)(x))


@pytest.mark.parametrize("mode", ["token", "l2", "batch"])
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.0, 4096.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_constant_row_gives_zeros_and_finite_gradients(mode, constant, dtype):
    """For l2 the constant must be zero; for batch every row is the same, so that their spread is zero."""
    if mode == "l2" and constant:
        pytest.skip("an l2 row of a constant is a unit row")
    x = torch.full((2, HEADS, 4, WIDTH), constant, dtype=dtype, requires_grad=True)
    out = make(mode)(x)
    assert torch.equal(out, torch.zeros_like(out))
    (out * torch.randn_like(out)).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("constant", [0.1, 0.7, 3.3, 12.3, 1e4, -7.7])
@pytest.mark.parametrize("width", [7, 8, 24, 64])
def test_a_constant_row_whose_mean_is_rounded_gives_zeros_too(constant, width):
    out = PreSBN("token")(torch.full((1, HEADS, 4, width), constant))
    assert out.norm(dim=-1).max() < 1e-4


def test_a_huge_constant_row_that_rounds_stays_in_the_unit_ball():
    out = PreSBN("token")(torch.full((1, HEADS, 4, 7), 1e30))
    assert out.isfinite().all()
    assert (out.norm(dim=-1) <= 1 + 1e-6).all()


def test_rows_below_epsilon_shrink_towards_zero_without_a_jump():
    """max(‖u‖², d·ε) is continuous: just below, the norm is ‖u‖/√(dε)."""
    eps = 1e-4
    limit = math.sqrt(WIDTH * eps)
    direction = normalize(torch.randn(1, HEADS, 1, WIDTH, dtype=torch.float64), dim=-1)
    for factor in (0.0, 0.25, 0.999, 1.0, 1.001, 50.0):
        norm = make("l2", eps=eps)(factor * limit * direction).norm(dim=-1)
        torch.testing.assert_close(norm, torch.full_like(norm, min(1.0, factor)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_output_and_nothing_else(mode, dtype):
    x = inputs(dtype=torch.float32).to(dtype)
    out = make(mode)(x)
    assert out.dtype == dtype
    assert torch.equal(out, make(mode)(x.float()).to(dtype))


def test_autocast_does_not_reach_the_statistics():
    x = inputs(dtype=torch.float32)
    for mode in MODES:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = make(mode)(x)
        assert torch.equal(out, make(mode)(x))


def test_batch_statistics_are_those_of_the_tokens_that_take_part():
    x, mask = inputs(), ragged_mask()
    garbage = torch.where(mask[:, None, :, None], x, 1e3)
    rows = chosen(x, mask)
    mean, variance = rows.mean(1, keepdim=True), rows.var(1, keepdim=True, unbiased=False)
    norm = make("batch").double()
    expected = normalize((x - mean) / variance.sqrt(), dim=-1)
    torch.testing.assert_close(chosen(norm(garbage, mask), mask), chosen(expected, mask))
    torch.testing.assert_close(norm.running_mean, 0.1 * mean)
    torch.testing.assert_close(norm.running_variance, 0.9 + 0.1 * variance)


def test_batch_with_padding_equals_the_truncated_batch():
    """Outputs, gradients and running averages."""
    x = inputs(length=6)
    padded = torch.cat([x, torch.randn(4, HEADS, 3, WIDTH).double()], dim=2)
    mask = torch.arange(9).expand(4, 9) < 6
    short, long = make("batch").double(), make("batch").double()
    grad = torch.randn_like(x)
    x.requires_grad_()
    padded.requires_grad_()
    out_short, out_long = short(x), long(padded, mask)
    torch.testing.assert_close(out_long[:, :, :6], out_short)
    (out_short * grad).sum().backward()
    (out_long[:, :, :6] * grad).sum().backward()
    torch.testing.assert_close(padded.grad[:, :, :6], x.grad)
    assert not padded.grad[:, :, 6:].any()
    for name, buffer in short.named_buffers():
        torch.testing.assert_close(dict(long.named_buffers())[name], buffer)


@pytest.mark.parametrize("training", [True, False])
def test_nan_in_padding_reaches_no_other_row(training):
    x, mask = inputs(), ragged_mask()
    x = torch.where(mask[:, None, :, None], x, math.nan).requires_grad_()
    norm = make("batch").double().train(training)
    out = chosen(norm(x, mask), mask)
    assert out.isfinite().all()
    (out * torch.randn_like(out)).sum().backward()
    assert chosen(x.grad, mask).isfinite().all()
    assert all(buffer.isfinite().all() for buffer in norm.buffers())


def test_running_averages_have_momentum_a_tenth_and_biased_variance():
    norm = make("batch").double()
    mean, variance = torch.zeros(HEADS, 1, WIDTH).double(), torch.ones(HEADS, 1, WIDTH).double()
    for _ in range(3):
        x = inputs()
        norm(x)
        mean = 0.9 * mean + 0.1 * x.mean((0, 2))[:, None]
        variance = 0.9 * variance + 0.1 * x.var((0, 2), unbiased=False)[:, None]
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_variance, variance)
    norm.eval()
    x = inputs()
    torch.testing.assert_close(norm(x), normalize((x - mean) / variance.sqrt(), dim=-1))
    torch.testing.assert_close(norm(x, ragged_mask()), norm(x))
    torch.testing.assert_close(norm.running_mean, mean)


def test_another_momentum():
    norm = make("batch", momentum=0.5).double()
    x = inputs()
    norm(x)
    torch.testing.assert_close(norm.running_mean, 0.5 * x.mean((0, 2))[:, None])


def test_running_averages_stand_still_where_they_are_not_tracked():
    norm = make("batch").double()
    x = inputs()
    expected = copy.deepcopy(norm)(x)
    torch.testing.assert_close(norm(x, track=False), expected)
    assert not norm.running_mean.any()
    assert (norm.running_variance == 1).all()


@pytest.mark.parametrize("how", ["masked", "empty sequence", "empty batch"])
def test_no_tokens_change_nothing_and_give_no_nan(how):
    norm = make("batch")
    norm(inputs(dtype=torch.float32))
    before = copy.deepcopy(norm.state_dict())
    x, mask = inputs(dtype=torch.float32), None
    if how == "masked":
        mask = torch.zeros(4, 10, dtype=torch.bool)
    else:
        x = x[:, :, :0] if how == "empty sequence" else x[:0]
    x.requires_grad_()
    out = norm(x, mask)
    assert out.shape == x.shape
    assert out.isfinite().all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())


def test_running_averages_are_saved_and_stay_in_float32():
    norm = make("batch")
    for _ in range(3):
        norm(inputs(dtype=torch.float32))
    before = copy.deepcopy(norm.state_dict())
    assert set(before) == {"running_mean", "running_variance"}
    assert {t.shape for t in before.values()} == {(HEADS, 1, WIDTH)}
    for cast in (torch.bfloat16, torch.float16):
        norm.to(cast)
        assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())
    other = make("batch", dtype=torch.bfloat16).eval()
    assert other.running_mean.dtype == torch.float32
    other.load_state_dict(before)
    x = inputs(dtype=torch.float32)
    assert torch.equal(other(x), norm.eval()(x))
    assert norm.double().running_mean.dtype == torch.float64


@pytest.mark.parametrize("module", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inputs_may_have_another_precision_than_the_averages(module, dtype):
    norm = make("batch", dtype=module)
    x = inputs(dtype=torch.float32).to(dtype)
    assert norm(x).dtype == dtype
    assert norm.running_mean.dtype == module
    mean = 0.1 * x.double().mean((0, 2))[:, None]
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
    assert norm.eval()(x).dtype == dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_pre_gradients_in_float64(mode, masked, training):
    norm = make(mode, eps=1e-5).double()
    norm(inputs())
    norm.train(training)
    mask = torch.tensor([[True, False, True, True, True], [True] * 5]) if masked else None
    x = inputs(2, 5).requires_grad_()
    call = (lambda x: chosen(norm(x, mask), mask)) if masked else norm
    assert torch.autograd.gradcheck(call, (x,), fast_mode=True)


@pytest.mark.parametrize("mode", ["layer", "", None, "Token"])
def test_an_unknown_mode_is_an_error_that_lists_the_known_ones(mode):
    with pytest.raises(ValueError, match=r"unknown normalization .*'token', 'batch', 'l2'"):
        PreSBN(mode, HEADS, WIDTH)


def test_batch_statistics_need_sizes_that_fit():
    with pytest.raises(ValueError, match="needs num_heads and head_dim"):
        PreSBN("batch")
    for shape in ((4, HEADS + 1, 5, WIDTH), (HEADS + 1, 5, WIDTH), (5, WIDTH)):
        with pytest.raises(ValueError, match=rf"statistics for {HEADS} heads.*pass num_key_heads"):
            make("batch")(torch.randn(shape))


def test_batch_statistics_are_over_all_leading_dimensions():
    x, mask = torch.randn(2, 3, HEADS, 5, WIDTH), torch.rand(2, 3, 5) > 0.3
    norms = [make("batch") for _ in range(2)]
    got, right = norms[0](x, mask), norms[1](x.flatten(0, 1), mask.flatten(0, 1))
    torch.testing.assert_close(got, right.unflatten(0, (2, 3)))
    torch.testing.assert_close(norms[0].running_mean, norms[1].running_mean)
    torch.testing.assert_close(make("batch")(x[0, 0]), make("batch")(x[:1, 0])[0])


def test_post_is_the_identity_where_it_starts():
    x = torch.randn(2, HEADS, 10, WIDTH)
    assert torch.equal(PostSBN(HEADS, WIDTH)(x), x)


def test_post_is_its_formula_with_a_power_for_each_head_and_channel():
    post = PostSBN(HEADS, WIDTH).double()
    with torch.no_grad():
        post.gamma.copy_(torch.randn(HEADS, WIDTH))
        post.beta.copy_(torch.rand(HEADS, WIDTH) + 0.5)
    x = torch.randn(2, HEADS, 10, WIDTH, dtype=torch.float64)
    gamma, beta = post.gamma[:, None], post.beta[:, None]
    torch.testing.assert_close(post(x), gamma * x * (x**2 + 1e-6) ** ((beta - 1) / 2))
    # Far from zero it is the paper's γ · att^β, with the sign carried along.
    large = 10 * x.sign() + x
    torch.testing.assert_close(post(large), gamma * large.sign() * large.abs() ** beta, rtol=1e-6, atol=0)
    torch.testing.assert_close(post(-x), -post(x))


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 2.0, 0.0])
def test_post_has_finite_gradients_at_zero(beta):
    post = PostSBN(HEADS, WIDTH)
    with torch.no_grad():
        post.beta.fill_(beta)
    x = torch.zeros(2, HEADS, 4, WIDTH, requires_grad=True)
    out = post(x)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    for grad in (x.grad, post.gamma.grad, post.beta.grad):
        assert grad.isfinite().all()


def test_post_takes_a_negative_power_as_its_absolute_value():
    x = torch.randn(2, HEADS, 4, WIDTH)
    positive, negative = PostSBN(HEADS, WIDTH), PostSBN(HEADS, WIDTH)
    with torch.no_grad():
        positive.beta.fill_(0.7)
        negative.beta.fill_(-0.7)
    assert torch.equal(positive(x), negative(x))
    assert negative(1e-6 * x).abs().max() < 1e-2, "no pole at zero"


def test_post_parameters_have_one_value_per_head_and_channel():
    post = PostSBN(HEADS, 5, dtype=torch.float64)
    assert {name: p.shape for name, p in post.named_parameters()} == {"gamma": (HEADS, 5), "beta": (HEADS, 5)}
    assert all(p.dtype == torch.float64 for p in post.parameters())


def test_post_gradients_in_float64():
    post = PostSBN(2, 3).double()
    with torch.no_grad():
        post.beta.add_(0.3 * torch.randn(2, 3))
        post.beta[0, 0] = -0.8
    x = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)

    def call(x, gamma, beta):
        return torch.func.functional_call(post, {"gamma": gamma, "beta": beta}, (x,))

    assert torch.autograd.gradcheck(call, (x, post.gamma, post.beta))


def test_post_keeps_its_input_alone_for_the_backward_pass():
    post, x = PostSBN(HEADS, WIDTH), torch.randn(2, HEADS, 9, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        post(x)
    assert sum(t.nbytes for t in kept) == x.nbytes + post.gamma.nbytes + post.beta.nbytes


def test_post_is_the_same_where_pytorch_differentiates_it():
    post, x = PostSBN(2, 3).double(), torch.randn(2, 2, 4, 3, dtype=torch.float64)
    with torch.no_grad():
        post.gamma.mul_(1.3)
        post.beta.copy_(torch.linspace(-2, 2, 6).view(2, 3))
    parameters = dict(post.named_parameters())

    def total(parameters, x):
        return torch.func.functional_call(post, parameters, (x,)).square().sum()

    to_parameters, to_x = torch.func.grad(total, argnums=(0, 1))(parameters, x)
    x.requires_grad_()
    grads = torch.autograd.grad(post(x).square().sum(), [x, *parameters.values()])
    torch.testing.assert_close(grads, (to_x, *(to_parameters[name] for name in parameters)))


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("exported", [False, True])
def test_post_of_what_is_too_large_is_a_number(beta, exported, monkeypatch):
    """Its square does not fit, or it is infinite."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: exported)
    post, x = PostSBN(1, 4), torch.tensor([3e38, -3e38, torch.inf, -torch.inf]).view(1, 1, 4)
    with torch.no_grad():
        post.beta.fill_(beta)
        without_gradients = post(x)
    assert torch.equal(post(x), without_gradients)
    assert torch.equal(without_gradients.sign(), x.sign())
    if beta == 1:
        assert torch.equal(without_gradients, x)


def test_post_of_other_heads_is_refused():
    for shape in [(2, 1, 4, WIDTH), (2, HEADS, 4, WIDTH + 1), (HEADS, WIDTH)]:
        with pytest.raises(ValueError, match=rf"expected \(\.\.\., {HEADS}, n, {WIDTH}\), got"):
            PostSBN(HEADS, WIDTH)(torch.zeros(shape))
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        PostSBN(HEADS, WIDTH)([0.0])


def test_post_of_rows_on_another_device_is_refused():
    with pytest.raises(ValueError, match="γ and β are on meta, but rows are on cpu; move the module"):
        PostSBN(HEADS, WIDTH, device="meta")(torch.zeros(2, HEADS, 4, WIDTH))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_post_computes_in_float32(dtype):
    """Small outputs: 1e-3² is below float16's smallest number, so half precision would lose the ε."""
    post = PostSBN(HEADS, WIDTH)
    with torch.no_grad():
        post.beta.fill_(0.5)
    x = (1e-3 * torch.randn(2, HEADS, 4, WIDTH)).to(dtype)
    assert torch.equal(post(x), post(x.float()).to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(post(x.float()), post(x.float()))
    half = copy.deepcopy(post).to(dtype)
    assert half(x).dtype == dtype
    assert torch.equal(half(x), post(x))


@pytest.mark.parametrize("mode", ["token", "l2"])
def test_rows_whose_squares_overflow_are_unit_rows_too(mode):
    x = torch.randn(2, HEADS, 5, WIDTH)
    x[1] *= 1e25
    x.requires_grad_()
    got = PreSBN(mode)(x)
    torch.testing.assert_close(got, PreSBN(mode)(x.detach().double()).float())
    (grad,) = torch.autograd.grad((got * torch.arange(WIDTH)).sum(), x)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad((PreSBN(mode)(wide) * torch.arange(WIDTH)).sum(), wide)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=0)


def test_values_whose_squares_overflow_have_a_power():
    module, x = PostSBN(1, 3), torch.tensor([1e18, -1e25, 1e30]).view(1, 1, 3)
    with torch.no_grad():
        module.beta.fill_(0.5)
        torch.testing.assert_close(module(x).flatten(), torch.tensor([1e9, -(1e25**0.5), 1e15]))
