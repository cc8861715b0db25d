"""The kernels of post-SBN's power against its formula in float64, in the interpreter or on a GPU."""

import pytest
import torch
from ops.triton.specification import DEVICE, TOLERANCE, relative_error

from schoenbat import PostSBN, SchoenbAt
from schoenbat.ops import odd_power

pytest.importorskip("triton")
WIDTHS = [1, 5, 32, 64, 80, 200]


@pytest.fixture(params=[1, 2, 1000], ids="programs {}".format)
def launch(request, monkeypatch):
    """With few programs each has many tiles; with 2 the last one has fewer."""
    from schoenbat.ops.triton import launch_odd_power

    monkeypatch.setattr(launch_odd_power, "_PROGRAMS", request.param)
    monkeypatch.setattr(launch_odd_power, "_TILE", 512)
    return launch_odd_power


def draw(width, length=40, lead=(2,), heads=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, grad = normal(*lead, heads, length, width), normal(*lead, heads, length, width)
    x[..., 0, :] = 0.0
    gamma, beta = 1 + 0.5 * normal(heads, width), 1 + 0.7 * normal(heads, width)
    return [tensor.to(DEVICE) for tensor in (x.to(dtype), gamma, beta, grad.to(dtype))]


def specification(x, gamma, beta, grad):
    inputs = [tensor.double().requires_grad_() for tensor in (x, gamma, beta)]
    out = odd_power.specification(*inputs, PostSBN.epsilon)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.double())]


def assert_right(got, inputs):
    for name, a, b in zip(("out", "x", "gamma", "beta"), got, specification(*inputs), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < TOLERANCE[inputs[0].dtype], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_outputs_and_all_gradients(launch, width, dtype):
    x, gamma, beta, grad = inputs = draw(width, dtype=dtype)
    out = launch.forward(x, gamma, beta, PostSBN.epsilon)
    grads = launch.backward(grad, x, gamma, beta, PostSBN.epsilon)
    assert out.dtype == grads[0].dtype == dtype
    assert_right([out, *grads], inputs)


@pytest.mark.parametrize("lead", [(), (1,), (2, 2)], ids=str)
def test_any_leading_dimensions_and_lengths(launch, lead):
    for length in (1, 17):
        x, gamma, beta, grad = inputs = draw(8, length, lead)
        out = launch.forward(x, gamma, beta, PostSBN.epsilon)
        assert_right([out, *launch.backward(grad, x, gamma, beta, PostSBN.epsilon)], inputs)


def test_rows_and_gradients_may_lie_in_any_order(launch):
    x, gamma, beta, grad = inputs = draw(8)
    elsewhere = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, grad)]
    strided = [torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0] for t in (x, grad)]
    for rows, grads in (elsewhere, strided):
        out = launch.forward(rows, gamma, beta.mT.contiguous().mT, PostSBN.epsilon)
        assert_right([out, *launch.backward(grads, rows, gamma, beta, PostSBN.epsilon)], inputs)


def test_parameters_in_another_precision(launch):
    x, gamma, beta, grad = draw(8, dtype=torch.float16)
    inputs = x, gamma.half(), beta.double(), grad
    out = launch.forward(*inputs[:3], PostSBN.epsilon)
    grads = launch.backward(grad, *inputs[:3], PostSBN.epsilon)
    assert [g.dtype for g in grads] == [torch.float16, torch.float16, torch.float64]
    assert_right([out, *grads], inputs)


def test_nothing_gives_nothing(launch):
    for x in (torch.zeros(0, 3, 5, 8), torch.zeros(2, 3, 0, 8), torch.zeros(2, 3, 5, 0)):
        x, numbers = x.to(DEVICE), torch.ones(3, x.shape[-1], device=DEVICE)
        assert launch.forward(x, numbers, numbers, 1e-3).shape == x.shape
        to_x, *to_numbers = launch.backward(x, x, numbers, numbers, 1e-3)
        assert to_x.shape == x.shape
        assert not any(to.any() for to in to_numbers)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_what_is_too_large_has_a_power(launch, beta):
    """Its square does not fit, or it is infinite; at γ = β = 1 the power is the identity to the last bit."""
    x = torch.tensor([1e18, -1e25, 3e38, -torch.inf, 1e6, 999999.0, 1e-3, 1e-30], device=DEVICE).view(
        1, 1, 1, 8
    )
    gamma = torch.ones(1, 8, device=DEVICE)
    got = launch.forward(x, gamma, beta * gamma, PostSBN.epsilon)
    right = odd_power.specification(
        x.double(), gamma.double(), beta * gamma.double(), PostSBN.epsilon
    ).float()
    fits = right.abs() < torch.finfo(torch.float32).max
    torch.testing.assert_close(got[fits], right[fits], rtol=1e-4, atol=0)
    assert torch.equal(got.sign(), x.sign())
    if beta == 1:
        assert torch.equal(got, x)


def through_module(monkeypatch, kernels):
    monkeypatch.setattr(odd_power, "_has_kernels", lambda x: kernels)
    torch.manual_seed(0)
    post = PostSBN(3, 8).to(DEVICE)
    x, gamma, beta, _ = draw(8)
    with torch.no_grad():
        post.gamma.copy_(gamma)
        post.beta.copy_(beta)
    x.requires_grad_()
    out = post(x)
    inputs = [x, post.gamma, post.beta]
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    # With a graph of their own, gradients are those of plain operators.
    first = torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
    second = torch.autograd.grad(sum(g.float().square().sum() for g in first), inputs)
    return [out.detach(), *grads, *second]


def test_the_module_is_the_same_with_and_without_kernels(monkeypatch):
    without, with_kernels = (through_module(monkeypatch, kernels) for kernels in (False, True))
    for a, b in zip(with_kernels, without, strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.float32]


def test_heads_of_a_jagged_token_lie_side_by_side(monkeypatch):
    """As without kernels: a model brings them together by a view."""
    monkeypatch.setattr(odd_power, "_has_kernels", lambda x: True)
    starts = torch.tensor([0, 3, 7, 11], device=DEVICE)
    rows = torch.randn(3, 11, 3, 8, device=DEVICE)
    query, key, value = (torch.nested.nested_tensor_from_jagged(x, starts).transpose(1, 2) for x in rows)
    out = SchoenbAt(8, 3, 32, device=DEVICE)(query, key, value)
    assert out.transpose(1, 2).is_contiguous()


def test_gradients_of_a_batch_of_gradients(monkeypatch):
    monkeypatch.setattr(odd_power, "_has_kernels", lambda x: True)
    x = draw(8)[0].requires_grad_()
    out = PostSBN(3, 8).to(DEVICE)(x)
    batch = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    (together,) = torch.autograd.grad(out, x, batch, is_grads_batched=True, retain_graph=True)
    for grad, right in zip(together, batch, strict=True):
        torch.testing.assert_close(grad, torch.autograd.grad(out, x, right, retain_graph=True)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 64, 128, 200])
@pytest.mark.parametrize("length", [1, 63, 1000, 16384 + 7])
def test_the_gpu_takes_the_kernels(length, width, dtype):
    x, gamma, beta, grad = inputs = draw(width, length, dtype=dtype)
    post = PostSBN(3, width).to(DEVICE)
    with torch.no_grad():
        post.gamma.copy_(gamma)
        post.beta.copy_(beta)
    x.requires_grad_()
    assert odd_power._has_kernels(x)
    runs = []
    for _ in range(2):
        out = post(x)
        runs.append([out.detach(), *torch.autograd.grad(out, [x, post.gamma, post.beta], grad)])
    assert_right(runs[0], inputs)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
