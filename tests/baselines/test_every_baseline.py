"""What holds for every attention in the registry, whatever its method."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from schoenbat.registry import attention_names, build_attention


def inputs(length=300, dim=32, **options):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, length, dim, generator=generator).to(**options) for _ in range(3)]


def build(name):
    torch.manual_seed(0)
    return build_attention(name, head_dim=32, num_heads=2, max_length=512).eval()


def mask(length=300):
    """One sequence is padded on the right, the other has a hole."""
    taking_part = torch.ones(2, length, dtype=torch.bool)
    taking_part[0, 200:] = False
    taking_part[1, 50:60] = False
    return taking_part


def forward_backward(attention, tensors, key_mask):
    tensors = [x.detach().requires_grad_() for x in tensors]
    output = attention(*tensors, key_mask=key_mask, query_mask=key_mask)
    grads = torch.autograd.grad(output.float().square().sum(), tensors, allow_unused=True)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


class GeneratorsStayAtHome(TorchDispatchMode):
    """What a GPU refuses, here on any device: numbers for one device from the generator of another."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        assert generator is None or out.device == generator.device
        return out


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", attention_names())
def test_what_is_drawn_lies_on_the_default_device_and_is_the_same_everywhere(name, device):
    right = build(name).state_dict()
    with torch.device(device), GeneratorsStayAtHome():
        got = build(name).state_dict()
    assert got.keys() == right.keys()
    for a, b in zip(got.values(), right.values(), strict=True):
        assert (a.device.type, a.shape, a.dtype) == (device, b.shape, b.dtype)
        assert a.is_meta or torch.equal(a.cpu(), b)


@pytest.mark.parametrize("name", attention_names())
def test_half_precision_under_autocast(name):
    attention = build(name)
    with torch.autocast("cpu", torch.bfloat16):
        results = forward_backward(attention, inputs(), mask())
    assert results[0].dtype == torch.bfloat16
    assert all(result.isfinite().all() for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", attention_names())
def test_the_gpu_gives_what_the_cpu_gives(name):
    right = forward_backward(build(name).double(), inputs(dtype=torch.float64), mask())
    got = forward_backward(build(name).cuda(), inputs(device="cuda"), mask().cuda())
    for a, b in zip(got, right, strict=True):
        assert (a.cpu().double() - b).norm() <= 1e-3 * b.norm().clamp(min=1e-3), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", attention_names())
def test_half_precision_on_a_gpu(name):
    attention = build(name).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        results = forward_backward(attention, inputs(device="cuda"), mask().cuda())
    assert results[0].dtype == torch.bfloat16
    assert all(result.isfinite().all() for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", attention_names())
def test_compiles_to_one_graph_on_a_gpu(name):
    torch._dynamo.reset()
    attention = build(name).cuda()
    right = forward_backward(attention, inputs(device="cuda"), mask().cuda())
    got = forward_backward(torch.compile(attention, fullgraph=True), inputs(device="cuda"), mask().cuda())
    for a, b in zip(got, right, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm().clamp(min=1e-3), name
