"""What holds for every attention in the registry, and for every baseline in each of its forms."""

import copy
from typing import NamedTuple

import pytest
import torch
from oracle import Largest, gradients
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", attention_names())
def test_what_is_drawn_is_the_same_in_every_default_dtype(name, dtype):
    right = dict(build(name).named_buffers())
    torch.set_default_dtype(dtype)
    try:
        got = dict(build(name).named_buffers())
    finally:
        torch.set_default_dtype(torch.float32)
    for buffer, numbers in got.items():
        if numbers.is_floating_point():
            assert numbers.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(numbers.to(right[buffer].dtype), right[buffer], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", attention_names())
def test_a_cast_to_half_precision_leaves_what_is_drawn(name):
    right, got = (dict(attention.named_buffers()) for attention in (build(name), build(name).bfloat16()))
    assert all(torch.equal(got[buffer], right[buffer]) for buffer in right)
    assert all(buffer.dtype == torch.float64 for buffer in build(name).double().buffers())


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


class Baseline(NamedTuple):
    """An attention by its text, and what is its own in what holds for all."""

    text: str
    small: str = ""
    """Options with which a sequence of 40 tokens is a long one."""
    forms: tuple[bool, ...] = (False, True)
    """Of `is_causal`."""
    modes: tuple[bool, ...] = (False,)
    """Of `training`; True where numbers are drawn anew then."""
    value_dim: int = 5
    hides_queries: bool = True
    """Whether a masked query may be NaN."""
    has_convolution: bool = False
    """Of values, which takes holes for places of value zero."""
    rounding: float | None = None
    """What 16 bits may change beyond a number's own rounding; None where sums may be in 16 bits, too."""
    largest: int | None = None
    """The largest tensor of a call and its gradient, in numbers a token; None where it grows faster."""

    def build(self, options="", **sizes):
        torch.manual_seed(0)
        separator = "," if ":" in self.text else ":"
        return build_attention(f"{self.text}{separator}{options}".rstrip(":,"), **sizes)


BASELINES = [
    Baseline("softmax", hides_queries=False),
    Baseline("softmax:naive=true", hides_queries=False),
    Baseline("softmax:qk_norm=true", hides_queries=False, value_dim=4),
    Baseline("softmax:naive=true,qk_norm=true", hides_queries=False, value_dim=4),
    # Two rounds of 128 scores, or of at most 256 rotated coordinates.
    Baseline("reformer", "chunk_size=4", rounding=1e-5, largest=512),
    Baseline("nystromformer", "num_landmarks=8", (False,), rounding=1e-4, largest=128),
    Baseline(
        "nystromformer:conv_kernel_size=3", "num_landmarks=8", (False,), has_convolution=True, largest=128
    ),
    Baseline("skyformer", "num_landmarks=8", (False,), (False, True), rounding=2e-4, largest=128),
    Baseline("informer", "num_queries=7,num_samples=5", modes=(False, True), largest=128),
    # Eight blocks of 64 keys for a query, or 128 queries that see all keys.
    Baseline("bigbird", "block_size=3,num_random=2", largest=512),
    Baseline("cosformer", rounding=1e-5, largest=64),
    Baseline("rfa", rounding=1e-4, largest=128),
    Baseline("rfa:gate=true", forms=(True,), rounding=1e-4, largest=128),
    Baseline("performer", rounding=1e-5, largest=128),
    Baseline("mean", rounding=1e-5, largest=64),
    Baseline("none", rounding=1e-5, largest=64),
]


def test_every_baseline_has_a_line():
    assert {baseline.text.partition(":")[0] for baseline in BASELINES} == {*attention_names()} - {"schoenbat"}


def in_each_form(baselines):
    cases = [pytest.param(b, form, id=f"{b.text}-{form}") for b in baselines for form in b.forms]
    return pytest.mark.parametrize(("baseline", "is_causal"), cases)


in_each_form_and_mode = pytest.mark.parametrize(
    ("baseline", "is_causal", "training"),
    [
        pytest.param(b, form, mode, id=f"{b.text}-{form}-{mode}")
        for b in BASELINES
        for form in b.forms
        for mode in b.modes
    ],
)


def build_small(baseline):
    """In float64 and eval mode, with parameters that have left their first values."""
    attention = baseline.build(baseline.small, head_dim=4, num_heads=2).double().eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += torch.randn_like(parameter) / 10
    return attention


def small_inputs(baseline, n, batch=5):
    widths = 4, 4, baseline.value_dim
    return [torch.randn(batch, 2, n, width, dtype=torch.float64) for width in widths]


def masks(baseline, n):
    """With holes, padded on the left, by half and by most on the right, and without a token."""
    place = torch.arange(n)
    holes = place < 2 * n // 3 if baseline.has_convolution else place % 3 != 1
    return torch.stack([holes, place >= n // 3, place < (n + 1) // 2, place < n // 6, place < 0])


@in_each_form(BASELINES)
@pytest.mark.parametrize("n", [9, 40, 150])
def test_padded_is_truncated_in_outputs_and_gradients(baseline, is_causal, n):
    """Whatever is masked."""
    attention, mask, real = build_small(baseline), masks(baseline, n), small_inputs(baseline, n)
    hidden = ~mask[:, None, :, None]
    padded = [x.masked_fill(hidden, torch.nan) for x in real]
    if not baseline.hides_queries:
        padded[0] = real[0].clone()

    def masked():
        output = attention(*padded, key_mask=mask, query_mask=mask, is_causal=is_causal)
        return torch.cat([output[row][:, tokens] for row, tokens in enumerate(mask)], 1)

    def truncated():
        rows = ([x[row : row + 1, :, tokens] for x in real] for row, tokens in enumerate(mask))
        return torch.cat([attention(*row, is_causal=is_causal)[0] for row in rows], 1)

    parameters = list(attention.parameters())
    (got, got_grads), (expected, expected_grads) = (
        gradients(call, [*(x.requires_grad_() for x in tensors), *parameters])
        for call, tensors in ((masked, padded), (truncated, real))
    )
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got_grads, expected_grads)
    assert not any(grad.masked_select(hidden).any() for grad in got_grads[:3])
    assert all(grad.any() for grad in got_grads[3:])


@in_each_form_and_mode
def test_rows_without_a_key_give_zeros_and_finite_gradients(baseline, is_causal, training):
    attention, mask = build_small(baseline).train(training), torch.ones(3, 30, dtype=torch.bool)
    mask[0, :10], mask[1] = False, False
    # Positive numbers, as cosFormer has no weight for others.
    tensors = [x.abs().requires_grad_() for x in small_inputs(baseline, 30, batch=3)]
    output, grads = gradients(
        lambda: attention(*tensors, key_mask=mask, is_causal=is_causal), [*tensors, *attention.parameters()]
    )
    assert not output[1].any()
    assert (not output[0, :, :10].any()) == (is_causal or attention.needs_equal_lengths)
    assert output[0, :, 10:].all()
    assert output[2].all()
    assert all(grad.isfinite().all() for grad in grads)
    assert not any(grad[1].any() for grad in grads[:3])


@in_each_form_and_mode
def test_empty_sequences(baseline, is_causal, training):
    attention, (query, key, value) = build_small(baseline).train(training), small_inputs(baseline, 9)
    none = [x[:, :, :0] for x in (query, key, value)]
    assert attention(*none, is_causal=is_causal).shape == none[2].shape
    if not attention.needs_equal_lengths and not baseline.has_convolution:
        assert torch.equal(attention(query, *none[1:], is_causal=is_causal), torch.zeros_like(value))
        assert attention(none[0], key, value, is_causal=is_causal).shape == none[2].shape


@in_each_form(BASELINES)
@pytest.mark.parametrize(("n", "is_small"), [(8, True), (50, True), (500, True), (500, False)])
def test_16_bits_lose_only_the_rounding_of_inputs_and_output(baseline, is_causal, n, is_small):
    attention = baseline.build(baseline.small if is_small else "", head_dim=4, num_heads=2).eval()
    tensors = [x.bfloat16() for x in small_inputs(baseline, n)]
    exact = attention(*(x.double() for x in tensors), is_causal=is_causal)
    output = attention(*tensors, is_causal=is_causal)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(*tensors, is_causal=is_causal), output)
        assert torch.equal(attention(*(x.float() for x in tensors), is_causal=is_causal), output)
    cast = copy.deepcopy(attention).bfloat16()
    for got in (output, cast(*tensors, is_causal=is_causal)):
        assert got.dtype == torch.bfloat16
        assert (got - exact).norm() < 0.01 * exact.norm()
        if baseline.rounding is not None:
            torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=baseline.rounding)


@in_each_form_and_mode
def test_a_compiled_module_is_one_graph_and_equals_the_eager_one(baseline, is_causal, training):
    torch._dynamo.reset()  # every baseline is compiled through the same forward, and variants are limited
    attention, mask = build_small(baseline).train(training), masks(baseline, 70)
    tensors = [x.requires_grad_() for x in small_inputs(baseline, 70)]

    def call(attention):
        torch.manual_seed(0)
        return attention(*tensors, key_mask=mask, query_mask=mask, is_causal=is_causal)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    leaves = [*tensors, *attention.parameters()]
    torch.testing.assert_close(
        gradients(lambda: call(compiled), leaves), gradients(lambda: call(attention), leaves)
    )


@in_each_form(b for b in BASELINES if b.largest is not None)
@pytest.mark.parametrize(("n", "is_masked"), [(4096, False), (4096, True), (32768, False)])
def test_no_tensor_is_larger_than_the_sequence_asks_for(baseline, is_causal, n, is_masked):
    tensors = [torch.randn(1, 1, n, 32, requires_grad=True) for _ in range(3)]
    mask = torch.arange(n)[None] < n - 96 if is_masked else None
    attention = baseline.build(head_dim=32, num_heads=1)
    with Largest() as largest:
        attention(*tensors, key_mask=mask, query_mask=mask, is_causal=is_causal).sum().backward()
    assert largest.numel <= baseline.largest * n


@pytest.mark.gpu
@in_each_form(BASELINES)
def test_a_gpu_gives_what_the_cpu_gives_in_float64(baseline, is_causal):
    def results(device):
        attention = build_small(baseline).to(device)
        tensors = [x.to(device).requires_grad_() for x in small_inputs(baseline, 40)]
        call = {"key_mask": masks(baseline, 40).to(device), "is_causal": is_causal}
        output, grads = gradients(lambda: attention(*tensors, **call), [*tensors, *attention.parameters()])
        return [x.cpu() for x in (output, *grads)]

    for got, right in zip(results("cuda"), results("cpu"), strict=True):
        assert (got - right).norm() <= 1e-9 * right.norm()
