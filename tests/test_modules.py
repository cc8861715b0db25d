"""SchoenbAt against the composition written out densely, and all that a module must survive."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from schoenbat import (
    MaclaurinFeatures,
    RMFAState,
    RMFAWindowState,
    SchoenbAt,
    kernelized_attention,
    rmfa,
    rmfa_window,
)
from schoenbat.constructions import CONSTRUCTIONS
from schoenbat.kernels import DotProductKernel

HEADS, WIDTH, LENGTH, BATCH = 4, 8, 11, 2
MODES = ["token", "batch", "l2", None]


def make(**options) -> SchoenbAt:
    """In float64, with parameters that are not where they started; a small scale for rows of any norm."""
    options = {"num_features": 40, "seed": 0, "dtype": torch.float64, **options}
    if options.get("normalization", "token") is None:
        options.setdefault("scale", 0.1)
    module = SchoenbAt(WIDTH, HEADS, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 0.01 if name == "rho" else 0.1
            parameter += spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer += 0.3 * torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
    return module


def inputs(batch=BATCH, heads=HEADS, length=LENGTH, value_dim=WIDTH, kv_heads=None, dtype=torch.float64):
    kv_heads = heads if kv_heads is None else kv_heads
    return (
        torch.randn(batch, heads, length, WIDTH, dtype=dtype),
        torch.randn(batch, kv_heads, length, WIDTH, dtype=dtype),
        torch.randn(batch, kv_heads, length, value_dim, dtype=dtype),
    )


def normalize(module: SchoenbAt, norm, x, mask=None) -> torch.Tensor:
    """Pre-SBN by its formulas."""
    if norm is None:
        return x
    if norm.mode == "token":
        x = x - x.mean(-1, keepdim=True)
    if norm.mode == "batch":
        mean, variance = norm.running_mean, norm.running_variance
        if module.training:
            rows = x.transpose(1, 2).flatten(0, 1) if mask is None else x.transpose(1, 2)[mask]
            mean, variance = rows.mean(0)[:, None], rows.var(0, unbiased=False)[:, None]
        x = (x - mean) / variance.sqrt()
    return x / x.norm(dim=-1, keepdim=True)


def dense(module: SchoenbAt, q, k, v, *, key_mask=None, query_mask=None, is_causal=False) -> torch.Tensor:
    """Pre-SBN, all n² scores from `features`, the floored denominator, post-SBN: the whole of the method."""
    norms = (module.query_norm, module.key_norm)
    q, k = normalize(module, norms[0], q, query_mask), normalize(module, norms[1], k, key_mask)
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    features, planned = module.features, module.features.scale
    scale = torch.as_tensor(module.scale, dtype=torch.float64).expand(HEADS)[:, None, None]
    phi_q, phi_k = features(scale / math.sqrt(planned) * q), features(math.sqrt(planned) * k)
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    if is_causal:
        visible = visible.tril(k.shape[-2] - q.shape[-2])
    visible = visible.expand(q.shape[0], 1, -1, -1)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    scores = (phi_q @ phi_k.mT) * visible
    count = visible.sum(-1, keepdim=True)
    averaging = visible / count.clamp(min=1).double()
    mean_value, mean_logit = averaging @ v, (scale * q * (averaging @ k)).sum(-1, keepdim=True)
    zeroth, first = features.kernel.coefficients(1)
    if features.gains is not None:
        zeroth, first = zeroth * features.gains[0, 0] ** 2, first * features.gains[0, 1] ** 2
    total = scores.sum(-1, keepdim=True)
    floor = count * zeroth * (first / zeroth * mean_logit).clamp(-80, 0).exp()
    out = mean_value + (scores @ v - total * mean_value) / torch.maximum(total, floor)
    out = torch.where(count > 0, out, 0.0)
    if module.post is None:
        return out
    gamma, beta = module.post.gamma[:, None], module.post.beta[:, None]
    return gamma * out * (out**2 + 1e-6) ** ((beta - 1) / 2)


def right_mask(lengths, total=LENGTH) -> torch.Tensor:
    return torch.arange(total) < torch.tensor(lengths)[:, None]


def gradients(out, weight, leaves) -> list[torch.Tensor]:
    return list(torch.autograd.grad((out * weight).sum(), leaves))


@pytest.mark.parametrize("normalization", MODES)
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("scale", ["learned", 0.7, None])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_module_is_the_composition(normalization, construction, scale, is_causal):
    module = make(normalization=normalization, construction=construction, scale=scale)
    module.train(not (normalization == "batch" and is_causal))
    q, k, v = inputs()
    if normalization is None:  # logits of order 1, where the floor does not magnify rounding
        q, k = 0.2 * q, 0.2 * k
    mask = right_mask([LENGTH, 6])
    expected = dense(copy.deepcopy(module), q, k, v, key_mask=mask, query_mask=mask, is_causal=is_causal)
    out = module(q, k, v, key_mask=mask, query_mask=mask, is_causal=is_causal)
    for got, wanted, keep in zip(out, expected, mask, strict=True):
        torch.testing.assert_close(got[:, keep], wanted[:, keep], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"post": False},
        {"kernel": "inv"},
        {"kernel": "sqrt", "construction": "exact-low"},
        {"trainable_features": True},
        {"num_features": 5},
        {"value_dim": 3},
        {"value_dim": 13},
    ],
    ids=str,
)
def test_the_composition_with_other_options(options):
    module = make(**options)
    q, k, v = inputs(value_dim=options.get("value_dim", WIDTH))
    out = module(q, k, v)
    assert out.shape == v.shape
    torch.testing.assert_close(out, dense(module, q, k, v), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("queries", "keys"), [(3, 9), (9, 3), (1, 7), (5, 0), (0, 5)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_may_differ(queries, keys, is_causal):
    module = make()
    q, k, v = inputs()
    q, k, v = q[..., :queries, :], k[..., :keys, :], v[..., :keys, :]
    out = module(q, k, v, is_causal=is_causal)
    assert out.shape == (BATCH, HEADS, queries, WIDTH)
    if keys and queries:
        torch.testing.assert_close(out, dense(module, q, k, v, is_causal=is_causal), rtol=1e-8, atol=1e-9)
    else:
        assert not out.any()


def test_gradients_are_those_of_the_composition():
    module = make(trainable_features=True)
    leaves = [x.requires_grad_() for x in inputs()] + list(module.parameters())
    weight = torch.randn(BATCH, HEADS, LENGTH, WIDTH, dtype=torch.float64)
    out, expected = module(*leaves[:3]), dense(module, *leaves[:3])
    used = [leaf for leaf in leaves if leaf.numel()]
    for got, wanted in zip(gradients(out, weight, used), gradients(expected, weight, used), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_a_gradient_reaches_every_parameter(is_causal, construction):
    """Not one is None (data-parallel training waits for each), and those with elements are not all zero."""
    module = make(construction=construction, trainable_features=True)
    module(*inputs(), is_causal=is_causal).square().sum().backward()
    names = {name for name, _ in module.named_parameters()}
    blocks = (name for name in ("linear", "quadratic", "tail") if getattr(module.features, name).numel())
    directions = {f"features.{name}" for name in blocks}
    assert directions
    assert {"rho", "post.gamma", "post.beta", "features.gains"} | directions <= names
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or not parameter.numel(), name


def test_parameters_have_the_documented_shapes():
    module = SchoenbAt(WIDTH, HEADS, value_dim=5)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {"rho": (HEADS,), "post.gamma": (HEADS, 5), "post.beta": (HEADS, 5)}
    assert all(p.dim() >= 1 for p in SchoenbAt(WIDTH, HEADS, trainable_features=True).parameters())
    assert not list(SchoenbAt(WIDTH, HEADS, scale=None, post=False).parameters())


@pytest.mark.parametrize(
    ("kernel", "first"),
    [
        ("exp", 4.0),
        ("trigh", 4.0),
        ("inv", 0.9),
        ("logi", 0.9),
        (DotProductKernel.from_expression("1/(2 - x)", radius=2.0), 1.8),
    ],
    ids=str,
)
def test_a_learned_scale_starts_where_it_should_and_moves_fast(kernel, first):
    module = SchoenbAt(WIDTH, HEADS, kernel=kernel, dtype=torch.float64)
    torch.testing.assert_close(module.scale, torch.full((HEADS,), first, dtype=torch.float64))
    assert module.features.scale == pytest.approx(first)
    with torch.no_grad():
        module.rho.copy_(torch.tensor([-0.1, 0.0, 0.01, 0.1]))
    radius, rho = module.kernel.radius, module.rho.detach()
    if math.isinf(radius):
        expected = 4 * torch.exp(20 * rho)
    else:
        expected = radius / (1 + torch.exp(-20 * rho - math.log(9)))
        assert (module.scale < radius).all()
    torch.testing.assert_close(module.scale.detach(), expected)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_fixed_scale_is_a_number_and_no_parameter(scale):
    module = SchoenbAt(WIDTH, HEADS, scale=scale)
    assert module.scale == module.features.scale == scale
    assert module.rho is None
    assert "rho" not in module.state_dict()


def test_no_scale_is_that_of_scaled_dot_product_attention():
    assert SchoenbAt(16, HEADS, scale=None).scale == 0.25


def test_heads_with_other_scales_attend_differently():
    module = make(post=False)
    q, k, v = inputs()
    before = module(q, k, v)
    with torch.no_grad():
        module.rho[1] += 0.05
    after = module(q, k, v)
    changed = [not torch.equal(after[:, h], before[:, h]) for h in range(HEADS)]
    assert changed == [False, True, False, False]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalization", MODES)
def test_padded_equals_truncated(side, is_causal, normalization):
    """Outputs and the gradients of all inputs and parameters, with garbage in the padding."""
    module = make(normalization=normalization).eval()
    short = [x.requires_grad_() for x in inputs(length=6)]
    pad = LENGTH - 6
    keep = slice(0, 6) if side == "right" else slice(pad, None)
    long = [
        torch.cat([x.detach(), junk] if side == "right" else [junk, x.detach()], dim=2).requires_grad_()
        for x, junk in zip(short, 50 * torch.randn(3, BATCH, HEADS, pad, WIDTH).double(), strict=True)
    ]
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[:, keep] = True
    weight = torch.randn(BATCH, HEADS, 6, WIDTH, dtype=torch.float64)
    expected = module(*short, is_causal=is_causal)
    out = module(*long, key_mask=mask, query_mask=mask, is_causal=is_causal)[:, :, keep]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    parameters = list(module.parameters())
    wanted, got = gradients(expected, weight, short + parameters), gradients(out, weight, long + parameters)
    for one, other in zip(wanted[3:], got[3:], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-10)
    for one, other in zip(wanted[:3], got[:3], strict=True):
        torch.testing.assert_close(other[:, :, keep], one, rtol=1e-8, atol=1e-10)
        assert other.abs().sum() == pytest.approx(other[:, :, keep].abs().sum().item()), "padding has none"


def test_padded_equals_truncated_in_training_with_batch_statistics():
    short, long = make(normalization="batch"), make(normalization="batch")
    first = [x.requires_grad_() for x in inputs(length=6)]
    second = [torch.cat([x.detach(), torch.full_like(x[:, :, :3], 9.0)], dim=2) for x in first]
    second = [x.requires_grad_() for x in second]
    mask = right_mask([6, 6], 9)
    weight = torch.randn(BATCH, HEADS, 6, WIDTH, dtype=torch.float64)
    expected, out = short(*first), long(*second, key_mask=mask, query_mask=mask)[:, :, :6]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    wanted, got = gradients(expected, weight, first), gradients(out, weight, second)
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(other[:, :, :6], one, rtol=1e-8, atol=1e-10)
    for name, buffer in short.named_buffers():
        torch.testing.assert_close(dict(long.named_buffers())[name], buffer)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalization", MODES)
def test_a_sequence_of_padding_gives_zeros_and_finite_gradients(is_causal, normalization):
    module = make(normalization=normalization).eval()
    leaves = [x.requires_grad_() for x in inputs()]
    mask = right_mask([LENGTH, 0])
    out = module(*leaves, key_mask=mask, is_causal=is_causal)
    assert not out[1].any()
    out.square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in (*leaves, *module.parameters()))


@pytest.mark.parametrize("normalization", ["token", "l2", None])
def test_nan_stays_in_its_batch_row(normalization):
    module = make(normalization=normalization)
    q, k, v = inputs()
    clean = module(q, k, v)
    for x in (q, k, v):
        broken = x.clone()
        broken[1, 0, 2, 0] = math.nan
        out = module(*(broken if y is x else y for y in (q, k, v)))
        assert out[1].isnan().any(), "visible"
        assert torch.equal(out[0], clean[0])


def test_batch_statistics_in_causal_training_are_an_error():
    module = make(normalization="batch")
    with pytest.raises(ValueError, match=r"leaks the future.*normalization='token'"):
        module(*inputs(), is_causal=True)
    with pytest.raises(ValueError, match=r"\.eval\(\)"):
        module.step(*inputs(), None)
    module.eval()(*inputs(), is_causal=True)


@pytest.mark.parametrize("normalization", MODES)
def test_causal_outputs_do_not_depend_on_the_future(normalization):
    module = make(normalization=normalization).eval()
    q, k, v = inputs()
    changed = [torch.cat([x[:, :, :7], torch.randn_like(x[:, :, 7:])], dim=2) for x in (q, k, v)]
    before, after = module(q, k, v, is_causal=True), module(*changed, is_causal=True)
    torch.testing.assert_close(before[:, :, :7], after[:, :, :7], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, :, 7:], after[:, :, 7:])


def test_the_paper_as_its_text_has_it():
    module = SchoenbAt.paper(WIDTH, HEADS, 40, seed=0, dtype=torch.float64)
    assert module.features.construction == "paper"
    assert module.scale == pytest.approx(WIDTH**-0.5)
    assert module.query_norm.mode == module.key_norm.mode == "batch"
    q, k, v = inputs()
    expected = dense(copy.deepcopy(module), q, k, v)
    torch.testing.assert_close(module(q, k, v), expected, rtol=1e-8, atol=1e-9)
    module.eval()
    changed = torch.cat([v[:, :, :7], torch.randn_like(v[:, :, 7:])], dim=2)
    assert not torch.allclose(module(q, k, v)[:, :, :7], module(q, k, changed)[:, :, :7]), "bidirectional"


def test_the_paper_as_its_authors_ran_it_is_always_causal():
    module = SchoenbAt.paper(WIDTH, HEADS, 40, reading="code", seed=0, dtype=torch.float64)
    assert module.features.construction == "paper-code"
    assert module.features.degrees.count(0) == 1
    assert module.scale == pytest.approx(WIDTH**-0.5)
    assert module.query_norm.mode == "token"
    q, k, v = inputs()
    out = module(q, k, v)
    torch.testing.assert_close(out, dense(module, q, k, v, is_causal=True), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(out, module(q, k, v, is_causal=True))
    assert torch.equal(copy.deepcopy(module)(q, k, v), out)


def test_the_paper_takes_other_options_and_refuses_other_readings():
    module = SchoenbAt.paper(WIDTH, HEADS, 40, "inv", scale=0.5, post=False, normalization="token", seed=3)
    assert (module.scale, module.post, module.query_norm.mode) == (0.5, None, "token")
    assert module.kernel.name == "inv"
    with pytest.raises(ValueError, match="unknown reading 'both'; known: 'text', 'code'"):
        SchoenbAt.paper(WIDTH, HEADS, reading="both")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("construction", ["unbiased", "exact-low"])
def test_grouped_queries(is_causal, kv_heads, construction):
    """As repeating the shared heads; each query head keeps its own scale and post-SBN."""
    module = make(construction=construction)
    q, k, v = inputs(kv_heads=kv_heads)
    mask = right_mask([9, LENGTH])
    out = module(q, k, v, key_mask=mask, is_causal=is_causal, enable_gqa=True)
    repeated = (x.repeat_interleave(HEADS // kv_heads, dim=1) for x in (k, v))
    expected = module(q, *repeated, key_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(out, dense(module, q, k, v, key_mask=mask, is_causal=is_causal))
    with pytest.raises(ValueError, match="enable_gqa"):
        module(q, k, v)


@pytest.mark.parametrize("normalization", MODES)
@pytest.mark.parametrize("pieces", [[LENGTH], [7, 1, 1, 1, 1], [1] * LENGTH, [4, 7], [0, 11]])
def test_steps_continue_what_one_causal_call_does(normalization, pieces):
    module = make(normalization=normalization).eval()
    q, k, v = inputs()
    mask = ~right_mask([3, 0])  # left padding
    whole = module(q, k, v, key_mask=mask, is_causal=True)
    state, outputs = None, []
    for q_i, k_i, v_i, m_i in zip(
        *(x.split(pieces, dim=2) for x in (q, k, v)), mask.split(pieces, dim=1), strict=True
    ):
        out, state = module.step(q_i, k_i, v_i, state, key_mask=m_i)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, rtol=1e-9, atol=1e-10)
    assert state.count.tolist() == [LENGTH - 3, LENGTH]
    assert not whole[0, :, :3].any(), "padding before the first key sees nothing"


def test_steps_with_shared_key_heads_and_another_value_width():
    module = make(value_dim=5).eval()
    q, k, v = inputs(kv_heads=2, value_dim=5)
    whole = module(q, k, v, is_causal=True, enable_gqa=True)
    out, state = module.step(q[:, :, :6], k[:, :, :6], v[:, :, :6], None)
    rest, state = module.step(q[:, :, 6:], k[:, :, 6:], v[:, :, 6:], state)
    torch.testing.assert_close(torch.cat([out, rest], dim=2), whole, rtol=1e-9, atol=1e-10)
    assert state.value_sum.shape == (BATCH, 2, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_is_float32_at_least(dtype):
    module = SchoenbAt(WIDTH, HEADS, 40, seed=0).to(dtype).eval()
    out, state = module.step(*inputs(dtype=dtype), None)
    assert out.dtype == dtype
    assert state.feature_value.dtype == state.value_sum.dtype == torch.float32


@torch.no_grad()
def test_a_step_leaves_the_state_before_it_as_it_was():
    module = make().eval()
    _, state = module.step(*inputs(), None)
    before = copy.deepcopy(state)
    module.step(*inputs(), state)
    assert all(torch.equal(getattr(state, name), tensor) for name, tensor in vars(before).items())


@pytest.mark.parametrize("normalization", MODES)
def test_eval_is_deterministic_and_changes_nothing(normalization):
    module = make(normalization=normalization).eval()
    q, k, v = inputs()
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    first, second = module(q, k, v), module(q, k, v)
    assert torch.equal(first, second)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalization", MODES)
def test_autocast(is_causal, normalization):
    """bf16 in, bf16 out, float32 inside: as close to float32 as bf16 inputs allow."""
    scale = 0.1 if normalization is None else 1.0
    module = make(normalization=normalization, scale=scale, construction="exact-low", dtype=torch.float32)
    module.eval()
    q, k, v = inputs(dtype=torch.float32)
    reference = module(q, k, v, is_causal=is_causal)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(*leaves, is_causal=is_causal)
    assert out.dtype == torch.bfloat16
    # q, k, v and the output are rounded once each, to 2⁻⁹ of their size; logits are of order 1.
    assert ((out.float() - reference).norm() / reference.norm()) < 4 * 2**-9
    out.float().square().sum().backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in (*leaves, *module.parameters())
    )


def far_from_zero_under_autocast(call, reference):
    """The error, as a share of the output, for rows whose mean hides what they differ in once rounded."""
    q, k, v = inputs(dtype=torch.float32)
    rows = q + 30, k + 30, v
    with torch.no_grad():
        expected = reference(*rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(*rows)
    assert out.dtype == torch.bfloat16
    return float((out.float() - expected).norm() / expected.norm())


def test_autocast_normalises_rows_before_it_rounds_them():
    module = make(scale=1.0, construction="exact-low", dtype=torch.float32).eval()
    assert far_from_zero_under_autocast(module, module) < 4 * 2**-9
    step = lambda *rows: module.step(*rows, None)[0]  # noqa: E731
    assert far_from_zero_under_autocast(step, step) < 4 * 2**-9


def test_a_compiled_module_normalises_rows_before_autocast_rounds_them():
    module = make(scale=1.0, construction="exact-low", dtype=torch.float32).eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert far_from_zero_under_autocast(compiled, module) < 4 * 2**-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_module_in_half_precision(dtype, is_causal):
    module = SchoenbAt(WIDTH, HEADS, 40, scale=1.0, seed=0)
    half = copy.deepcopy(module).to(dtype)
    assert half.post.gamma.dtype == dtype
    q, k, v = (x.to(dtype) for x in inputs(dtype=torch.float32))
    out = half(q, k, v, is_causal=is_causal)
    assert out.dtype == dtype
    reference = module(q.float(), k.float(), v.float(), is_causal=is_causal)
    assert ((out.float() - reference).norm() / reference.norm()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("normalization", MODES)
@pytest.mark.parametrize("trainable", [False, True])
def test_a_saved_module_gives_the_same_outputs_after_loading(construction, normalization, trainable):
    options = {"construction": construction, "normalization": normalization, "trainable_features": trainable}
    options["scale"] = 0.1 if normalization is None else "learned"
    module = make(**options, dtype=torch.float32)
    q, k, v = inputs(dtype=torch.float32)
    module(q, k, v)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = SchoenbAt(WIDTH, HEADS, 40, seed=99, **options)
    other.load_state_dict(torch.load(file, weights_only=True))
    module.eval(), other.eval()
    assert torch.equal(module(q, k, v), other(q, k, v))
    assert torch.equal(module(q, k, v, is_causal=True), other(q, k, v, is_causal=True))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("normalization", MODES)
def test_copies(duplicate, normalization):
    module = make(normalization=normalization, trainable_features=True).eval()
    q, k, v = inputs()
    expected = module(q, k, v)
    other = duplicate(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(other(q, k, v), expected)


def test_no_two_modules_share_a_map_and_the_map_is_shared_by_the_heads():
    first, second = (SchoenbAt(WIDTH, HEADS, 40) for _ in range(2))
    assert not torch.equal(first.features.tail[..., :1], second.features.tail[..., :1])
    assert first.features.num_heads is None
    storages = [t.data_ptr() for t in nn.ModuleList([first, second]).state_dict().values() if t.numel()]
    assert len(storages) == len(set(storages))


def test_a_seed_means_the_map_of_that_seed():
    module = SchoenbAt(WIDTH, HEADS, 40, scale=0.5, seed=5)
    features = MaclaurinFeatures(WIDTH, 40, construction="unbiased", scale=0.5, seed=5)
    assert torch.equal(module.features.tail, features.tail)


def test_a_module_can_be_made_on_meta_and_filled():
    source = make(normalization="batch", trainable_features=True, dtype=torch.float32).eval()
    with torch.device("meta"):
        module = SchoenbAt(WIDTH, HEADS, 40, normalization="batch", trainable_features=True)
    module.to_empty(device="cpu").eval().load_state_dict(source.state_dict())
    q, k, v = inputs(dtype=torch.float32)
    assert torch.equal(module(q, k, v), source(q, k, v))


def test_a_short_training_lowers_the_loss():
    """Pick the value whose key equals the query: what the sharp default kernel is for."""
    module = SchoenbAt(WIDTH, HEADS, 64, seed=0)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        torch.manual_seed(step % 5)
        k, v = torch.randn(2, 4, HEADS, 12, WIDTH)
        loss = (module(k, k, v) - v).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(p.isfinite().all() for p in module.parameters())


def compiled_and_eager(backend, is_causal):
    module = make()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend=backend)
    q, k, v = inputs()
    mask = right_mask([LENGTH, 7])
    results = []
    for call in (module, compiled):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = call(*leaves, key_mask=mask, is_causal=is_causal)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves), *(p.grad for p in call.parameters())])
    return results


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_compiled_module_equals_the_eager_one(is_causal):
    """fullgraph, forward and backward; the graphs run without code generation, which takes longer."""
    for eager, compiled in zip(*compiled_and_eager("aot_eager", is_causal), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_compiled_module_equals_the_eager_one_with_generated_code(is_causal):
    for eager, compiled in zip(*compiled_and_eager("inductor", is_causal), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@torch.no_grad()
def test_as_many_queries_at_the_end_of_any_number_of_keys_are_compiled():
    module, (q, k, v) = make(normalization=None, post=False), inputs()
    compiled = torch.compile(module, fullgraph=True)
    for length in (LENGTH, LENGTH - 2):
        tensors = [q[:, :, -5:], k[:, :, :length], v[:, :, :length]]
        for rows in tensors[1:]:
            torch._dynamo.maybe_mark_dynamic(rows, 2)
        expected = module(*tensors, is_causal=True)
        torch.testing.assert_close(compiled(*tensors, is_causal=True), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": "layer"}, "unknown normalization 'layer'; known: 'token', 'batch', 'l2', None"),
        ({"scale": "fixed"}, "scale must be 'learned', a float or None, got 'fixed'"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"scale": math.nan}, "scale must be positive and finite"),
        ({"scale": 1.0, "kernel": "inv"}, "radius"),
        ({"construction": "random"}, "unknown construction 'random'; known: exact-low, unbiased, paper"),
        ({"kernel": "softmax"}, "softmax.*exp"),
        ({"num_features": 1}, "num_features"),
        ({"num_key_heads": 3}, "4 query heads cannot share 3 key heads evenly; pass num_key_heads"),
        ({"num_key_heads": 8}, "4 query heads cannot share 8 key heads evenly; pass num_key_heads"),
    ],
)
def test_bad_options_are_errors_that_name_the_problem(options, message):
    with pytest.raises(ValueError, match=message):
        SchoenbAt(WIDTH, HEADS, **options)


def test_bad_inputs_are_errors_that_name_the_problem():
    module = make()
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"expected query \(B, 4, n, 8\), got \(2, 3, 11, 8\)"):
        module(q[:, :3], k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match="expected query"):
        module(q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(ValueError, match="head_dim = 8"):
        module(q[..., :5], k[..., :5], v)
    for width in (1, 5):
        for call in (module, lambda *x: module.step(*x, None)):
            with pytest.raises(ValueError, match=rf"values of width 8, got \(2, 4, 11, {width}\)"):
                call(q, k, v[..., :width])
    with pytest.raises(TypeError, match="bool with True = takes part"):
        module(q, k, v, key_mask=torch.ones(BATCH, LENGTH))
    with pytest.raises(ValueError, match="key_mask must have shape"):
        module(q, k, v, key_mask=torch.ones(BATCH, LENGTH - 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="share key heads"):
        make(normalization="batch")(q, k[:, :2], v[:, :2], enable_gqa=True)


@pytest.mark.parametrize(
    "options", [{"separate_maps": True}, {"center_keys": "learned"}, {"map_per_head": True}], ids=str
)
def test_what_is_kept_for_each_key_head_needs_to_know_how_many(options):
    q, k, v = inputs(kv_heads=2)
    module = make(**options)
    for call in (lambda: module(q, k, v, enable_gqa=True), lambda: module.step(q, k, v, None)):
        with pytest.raises(
            ValueError, match=r"each of 4 key heads, got keys \(2, 2, 11, 8\); pass num_key_heads=2"
        ):
            call()
    assert make(**options, num_key_heads=2)(q, k, v, enable_gqa=True).shape == q.shape


def test_unbatched_inputs():
    module = make()
    q, k, v = inputs()
    torch.testing.assert_close(module(q[0], k[0], v[0]), module(q, k, v)[0])


WINDOWED = {"window": 3, "center_keys": "learned", "map_per_head": True, "separate_maps": True}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("center_keys", [False, True, "learned"])
def test_a_window_between_pre_and_post_sbn(is_causal, center_keys):
    module = make(window=3, center_keys=center_keys)
    q, k, v = inputs()
    mask = right_mask([LENGTH, 6])
    if center_keys is True and is_causal:
        with pytest.raises(
            ValueError, match="leaks the future into a causal call; use center_keys='learned'"
        ):
            module(q, k, v, is_causal=True)
        return
    rows = normalize(module, module.query_norm, q), normalize(module, module.key_norm, k)
    if center_keys is True:
        mean = (rows[1] * mask[:, None, :, None]).sum(-2, keepdim=True) / mask.sum(-1)[:, None, None, None]
        rows = rows[0], rows[1] - mean
    elif center_keys:
        rows = rows[0], rows[1] - module.key_center[:, None]
    expected = rmfa_window(
        *rows,
        v,
        module.features,
        3,
        key_mask=mask,
        is_causal=is_causal,
        scale=module.scale,
        far_weight=(20 * module.far_rho).exp(),
        implementation="reference",
    )
    torch.testing.assert_close(
        module(q, k, v, key_mask=mask, is_causal=is_causal), module.post(expected), rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("window", [None, 100])
def test_centring_keys_changes_no_exact_attention(window):
    """All keys near, or a map that is exact for the kernel's constant and linear part: a shift cancels."""
    q, k, v = (0.01 * x for x in inputs())
    options = {
        "normalization": None,
        "scale": 1.0,
        "construction": "exact-low",
        "window": window,
        "post": False,
    }
    plain, centred = (make(center_keys=c, **options)(q, k + 0.3, v) for c in (False, True))
    torch.testing.assert_close(centred, plain, rtol=1e-3 if window is None else 1e-9, atol=0)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("pieces", [[LENGTH], [1] * LENGTH, [4, 1, 6]])
@pytest.mark.parametrize("window", [0, 3, 20])
def test_windowed_steps_continue_what_one_causal_call_does(window, pieces, kv_heads):
    module = make(**{**WINDOWED, "window": window}, num_key_heads=kv_heads).eval()
    q, k, v = inputs(kv_heads=kv_heads)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, :2] = False
    expected = module(q, k, v, key_mask=mask, is_causal=True, enable_gqa=kv_heads != HEADS)
    rows, state = [], None
    for part in zip(*(x.split(pieces, dim=-2) for x in (q, k, v)), mask.split(pieces, dim=1), strict=True):
        out, state = module.step(*part[:3], state, key_mask=part[3])
        rows.append(out)
    torch.testing.assert_close(torch.cat(rows, dim=-2), expected, rtol=1e-8, atol=1e-9)
    assert state.count.tolist() == [LENGTH - 2, LENGTH]
    before = state.key.clone()
    assert torch.equal(state.reorder(torch.tensor([1, 1])).key, before[[1, 1]])


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_gradient_reaches_every_parameter_of_a_windowed_module(is_causal):
    module = make(**WINDOWED, trainable_features=True)
    module(*inputs(), is_causal=is_causal).square().sum().backward()
    held = [p for p in module.parameters() if p.numel()]  # a map without pairs has an empty block for them
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in held)
    assert all(p.dim() > 0 for p in held)


def test_a_state_of_the_other_kind_is_an_error():
    q, k, v = inputs(length=1)
    modules = make().eval(), make(window=2).eval()
    states = [module.step(q, k, v, None)[1] for module in modules]
    for module, state in zip(modules, reversed(states), strict=True):
        with pytest.raises(TypeError, match=r"window=(None|2) does not go on from RMFA"):
            module.step(q, k, v, state)


def test_separate_maps_without_a_window():
    module, (q, k, v) = make(separate_maps=True, normalization=None, post=False), inputs()
    expected = rmfa(q @ module.query_map, k @ module.key_map, v, module.features, scale=module.scale)
    torch.testing.assert_close(module(q, k, v), expected)


@pytest.mark.parametrize("mask_rows", [BATCH, 1])
def test_masked_keys_of_nan_reach_no_separate_map(mask_rows):
    module, (q, k, v) = make(separate_maps=True), inputs()
    mask = right_mask([LENGTH - 3] * mask_rows)
    results = []
    for poison in (0.0, torch.nan):
        k[:, :, -3:] = poison
        module.zero_grad()
        out = module(q, k, v, key_mask=mask)
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("window", [None, 1])
def test_masked_keys_of_nan_reach_no_separate_map_in_steps(window):
    module, (q, k, v) = make(separate_maps=True, window=window), inputs()
    mask = torch.arange(LENGTH).expand(BATCH, -1) > 2
    k[:, :, :3] = torch.nan
    first, state = module.step(q[:, :, :6], k[:, :, :6], v[:, :, :6], None, key_mask=mask[:, :6])
    rest, _ = module.step(q[:, :, 6:], k[:, :, 6:], v[:, :, 6:], state)
    (first.square().sum() + rest.square().sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    assert module.key_map.grad.any()


def test_a_windowed_module_is_saved_whole_and_runs_in_half_precision():
    module = make(**WINDOWED)
    other = SchoenbAt(WIDTH, HEADS, 40, **WINDOWED, dtype=torch.float64)
    other.load_state_dict(module.state_dict())
    q, k, v = inputs()
    assert torch.equal(other(q, k, v), module(q, k, v))
    half = copy.deepcopy(module).bfloat16()(*(x.bfloat16() for x in (q, k, v)))
    assert half.dtype == torch.bfloat16
    assert (half - module(q, k, v)).norm() / module(q, k, v).norm() < 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.float()(q.float(), k.float(), v.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"window": 16}, {"window": 16, "separate_maps": True}], ids=str)
def test_calibration_brings_a_module_closer_to_softmax(options):
    """Rows that wander, with a mean of their own, as the keys of a trained model have."""
    walk = torch.nn.functional.normalize(torch.randn(2, HEADS, 150, WIDTH).cumsum(-2), dim=-1)
    q, k, v = walk, walk + 2, torch.randn(2, HEADS, 150, WIDTH)
    module = SchoenbAt(
        WIDTH,
        HEADS,
        20,
        construction="exact-low",
        normalization=None,
        center_keys="learned",
        post=False,
        seed=0,
        **options,
    )
    exact = kernelized_attention(q, k, v, scale=4.0, is_causal=True)
    module.set_scale(torch.full((HEADS,), 4.0))
    before = (module(q, k, v, is_causal=True) - exact).norm()
    module.calibrate(q, k, v, is_causal=True, target_scale=4.0)
    after = (module(q, k, v, is_causal=True) - exact).norm()
    assert after < 0.6 * before
    torch.testing.assert_close(module.key_center, k.mean((0, 2)))
    if options:
        torch.testing.assert_close(module.scale, torch.full((HEADS,), 4.0))


def test_an_always_causal_module_is_calibrated_for_causal_attention():
    q, k, v = (torch.randn(2, HEADS, 60, WIDTH) for _ in range(3))
    scales = []
    for is_causal in (False, True):
        options = {"reading": "code", "scale": "learned", "construction": "exact-low", "seed": 0}
        module = SchoenbAt.paper(WIDTH, HEADS, 16, **options)
        module.calibrate(q, k, v, is_causal=is_causal, target_scale=4.0)
        scales.append(module.scale)
    assert (scales[0] < 3.9).any()
    assert torch.equal(*scales)


def test_calibration_looks_at_real_keys_only_and_at_shared_heads():
    module = make(
        construction="exact-low", center_keys="learned", num_key_heads=2, normalization=None, scale=0.3
    )
    q, k, v = inputs(kv_heads=2)
    mask = right_mask([LENGTH, 6])
    k[1, :, 6:] = torch.nan
    module.calibrate(q, k, v, key_mask=mask)
    expected = torch.cat([k[0], k[1, :, :6]], dim=1).mean(1)
    torch.testing.assert_close(module.key_center.data, expected)
    assert module.features.quadratic.isfinite().all()
    with pytest.raises(ValueError, match=r"fixed at 0\.3 and cannot become 0\.5"):
        module.calibrate(q, k, v, key_mask=mask, target_scale=0.5)


def rows(heads=HEADS, length=LENGTH, fill=0.5):
    return torch.full((BATCH, heads, length, WIDTH), fill, dtype=torch.float64)


REFUSED = [
    ({"scale": 0.3}, {"target_scale": 0.5}, r"fixed at 0\.3 and cannot become 0\.5"),
    ({"scale": 0.3}, {"target_scale": math.nan}, "target_scale must be a finite number, got nan"),
    ({}, {"target_scale": -1.0}, "a scale must be above 0"),
    ({}, {"target_scale": [0.3]}, r"target_scale must be a finite number, got \[0\.3\]"),
    ({}, {"is_causal": "no"}, "is_causal must be True or False"),
    ({}, {"value": rows(length=LENGTH - 1)}, "the same length"),
    ({}, {"value": rows(heads=1)}, "key has 4 heads and value 1"),
    ({}, {"key": rows().float()}, "key is torch.float32 but query is torch.float64"),
    ({}, {"key": rows(fill=math.nan)}, "no mean"),
    ({}, {"key": rows(length=0), "value": rows(length=0)}, "no key takes part"),
    ({}, {"key_mask": torch.zeros(BATCH, LENGTH, dtype=torch.bool)}, "no key takes part"),
    # What is found out when something is fitted already:
    ({}, {"query": rows(fill=math.nan)}, "query"),
    ({"kernel": "inv", "center_keys": False}, {"target_scale": 0.9}, "outside the radius 1"),
    ({}, {"value": rows(fill=math.nan), "target_scale": 0.3}, "value hold NaN or infinite"),
    ({"window": 3}, {"value": rows(fill=math.inf), "target_scale": 0.3}, "value hold NaN or infinite"),
    ({"window": 3}, {"query": rows(length=2), "target_scale": 0.3}, "as many"),
]


@pytest.mark.parametrize(("options", "call", "message"), REFUSED)
def test_a_refused_calibration_changes_nothing(options, call, message):
    options = {"construction": "exact-low", "center_keys": "learned", "scale": "learned"} | options
    module = make(normalization=None, **options)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    call = dict(zip(("query", "key", "value"), inputs(), strict=True)) | call
    with pytest.raises((TypeError, ValueError), match=message):
        module.calibrate(**call)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("options", [{}, {"separate_maps": True}], ids=str)
@pytest.mark.parametrize("target", [0.45, 4 / 7, 0.9])
def test_calibration_keeps_scales_below_a_finite_radius(target, options):
    """Of 40 candidates up to twice the target some would be 1 and more; 7/4 of 4/7 rounds to 1 in float32."""
    module = SchoenbAt(WIDTH, HEADS, 40, "inv", seed=0, post=False, **options)
    q, k, v = inputs(dtype=torch.float32)
    module.calibrate(q, k, v, target_scale=target)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert (module.scale < 1).all()
    assert module(q, k, v).isfinite().all()
    with pytest.raises(ValueError, match=r"below the radius 1 of the kernel 'inv', got \[1\.5"):
        module.calibrate(q, k, v, target_scale=1.5)


def test_calibration_sums_up_errors_in_float32():
    """Of values that float16 holds, whose square errors it does not."""
    q, k, v = (x.half() for x in inputs(dtype=torch.float32))
    scales = []
    for dtype in (torch.float16, torch.float32):
        module = SchoenbAt(WIDTH, HEADS, 40, post=False, seed=0)
        module.calibrate(*(x.to(dtype) for x in (q, k, 500 * v)), target_scale=1.0)
        scales.append(module.scale.data)
    torch.testing.assert_close(*scales)


def test_calibration_never_chooses_what_gives_nan(monkeypatch):
    module = SchoenbAt(WIDTH, HEADS, 40, normalization=None, seed=0, post=False)
    q, k, v = inputs(dtype=torch.float32)
    attend = module.attend

    def nan_below_one(*rows, **options):
        out = attend(*rows, **options)
        return torch.where((module.scale < 1.0)[:, None, None], torch.nan, out)

    monkeypatch.setattr(module, "attend", nan_below_one)
    module.calibrate(q, k, v, target_scale=1.0)
    assert (module.scale > 0.999).all()


@pytest.mark.parametrize(
    ("kernel", "bad"), [("inv", 1.0), ("inv", 1.5), ("exp", 0.0), ("exp", -1.0), ("exp", math.nan)]
)
def test_a_scale_that_cannot_be_reached_is_an_error(kernel, bad):
    module = SchoenbAt(WIDTH, HEADS, 40, kernel)
    with pytest.raises(ValueError, match=f"below the radius .* of the kernel '{kernel}', got"):
        module.set_scale(torch.tensor([0.5, bad, 0.5, 0.5]))
    assert not module.rho.any(), "nothing was set"
    SchoenbAt(WIDTH, HEADS, 40, kernel, device="meta").set_scale(torch.full((HEADS,), 0.5, device="meta"))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_of_far_keys_that_cannot_be_reached_is_an_error(bad):
    module = SchoenbAt(WIDTH, HEADS, 40, window=2)
    with pytest.raises(ValueError, match="far keys must be positive and finite, got"):
        module.set_far_weight(torch.tensor([1.0, bad, 1.0, 1.0]))
    assert not module.far_rho.any(), "nothing was set"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "at least 0, got -1"),
        ({"window": 2.5}, r"integer of at least 0, got 2\.5"),
        ({"window": 2, "kernel": "inv"}, "needs the kernel 'exp'"),
        ({"center_keys": "mean"}, "must be False, True or 'learned', got 'mean'"),
        ({"center_keys": True, "kernel": "inv"}, "center_keys needs the kernel 'exp'"),
    ],
    ids=str,
)
def test_bad_windows_and_centres_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        SchoenbAt(WIDTH, HEADS, **options)


def rotated(x, start):
    """Rotary positions: pairs of channels turn by the position times a frequency of their own."""
    angle = (start + torch.arange(x.shape[-2]))[:, None] * 0.5 ** torch.arange(WIDTH // 2)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


@pytest.mark.parametrize("normalization", MODES)
@pytest.mark.parametrize("window", [None, 2])
def test_rotary_positions_stay_relative_where_only_norms_are_changed(normalization, window):
    """With all features of degree 2, so that the map is a function of the inner product."""
    options = {"construction": "exact-low", "num_features": 1 + WIDTH + WIDTH * (WIDTH + 1) // 2}
    module, (q, k, v) = make(normalization=normalization, window=window, **options).eval(), inputs()
    here, there = (module(rotated(q, start), rotated(k, start), v, is_causal=True) for start in (0, 100))
    assert torch.allclose(here, there, rtol=1e-5, atol=1e-6) == (normalization in ("l2", None))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("options", [{}, {"window": 2, "construction": "exact-low"}])
def test_a_first_step_takes_any_leading_dimensions(lead, options):
    module = SchoenbAt(8, 4, 32, **options).eval()
    q, k, v = torch.randn(3, *lead, 4, 5, 8).unbind()
    out, state = module.step(q[..., :2, :], k[..., :2, :], v[..., :2, :], None)
    rest, _ = module.step(q[..., 2:, :], k[..., 2:, :], v[..., 2:, :], state)
    torch.testing.assert_close(torch.cat([out, rest], dim=-2), module(q, k, v, is_causal=True))


def test_statistics_of_keys_are_kept_for_each_key_head():
    module = SchoenbAt(8, 4, 32, normalization="batch", num_key_heads=2)
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    assert module(q, k, v, enable_gqa=True).shape == q.shape
    with pytest.raises(ValueError, match="where query heads share key heads pass num_key_heads"):
        SchoenbAt(8, 4, 32, normalization="batch")(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("normalization", ["token", "l2", "batch", None])
@pytest.mark.parametrize("options", [{}, {"window": 1, "construction": "exact-low"}, {"separate_maps": True}])
@pytest.mark.parametrize("training", [True, False])
def test_what_masked_keys_hold_reaches_no_gradient(normalization, options, training):
    module = SchoenbAt(8, 2, 32, normalization=normalization, scale=0.5, **options).train(training)
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    k, v = k.clone(), v.clone()
    k[..., 3, :] = v[..., 3, :] = math.nan
    mask = torch.tensor([[True, True, True, False]])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = module(*leaves, key_mask=mask)
    for grad in torch.autograd.grad(out.sum(), [*leaves, *module.parameters()], allow_unused=True):
        assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("name", ["post", "map_per_head", "separate_maps", "trainable_features"])
def test_a_word_is_no_flag(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
        SchoenbAt(8, 2, **{name: "no"})


def test_a_head_of_no_width_is_named():
    with pytest.raises(ValueError, match="head_dim must be an integer of at least 1, got -1"):
        SchoenbAt(-1, 8)


def test_a_compiled_module_can_be_pickled():
    module = SchoenbAt(8, 2, 32)
    module.compile()
    module.features.compile()
    other = pickle.loads(pickle.dumps(module))
    assert torch.equal(other.features.tail, module.features.tail)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (3, 1, 2)])
@pytest.mark.parametrize("normalization", [None, "token"])
def test_calibrate_takes_rows_of_all_leading_dimensions_that_forward_takes(lead, normalization):
    options = {"construction": "exact-low", "center_keys": "learned", "num_key_heads": 2, "seed": 0}
    free, flat = (SchoenbAt(8, 4, 30, normalization=normalization, **options) for _ in range(2))
    q, k, v = (torch.randn(*lead, heads, 10, 8) for heads in (4, 2, 2))
    mask = torch.rand(*lead, 10) < 0.7
    free.calibrate(q, k, v, key_mask=mask, target_scale=1.0)
    flat_rows = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    flat.calibrate(*flat_rows, key_mask=mask.reshape(-1, 10), target_scale=1.0)
    assert all(torch.equal(a, b) for a, b in zip(free.parameters(), flat.parameters(), strict=True))
    assert torch.equal(free.features.quadratic, flat.features.quadratic)
    assert free(q, k, v, key_mask=mask, enable_gqa=True).shape == q.shape


def test_calibrate_refuses_rows_whose_leading_dimensions_differ():
    q, k = torch.randn(2, 3, 4, 10, 8), torch.randn(3, 2, 4, 10, 8)
    with pytest.raises(ValueError, match=r"key has leading dimensions \(3, 2\), query has \(2, 3\)"):
        SchoenbAt(8, 4, construction="exact-low").calibrate(q, k, k)


def test_calibrate_says_where_there_is_nothing_to_fit():
    x = torch.randn(2, 4, 10, 8)
    with pytest.raises(ValueError, match=r"nothing to fit: .* 'unbiased' .* give a target_scale, or"):
        SchoenbAt(8, 4).calibrate(x, x, x)
    SchoenbAt(8, 4).calibrate(x, x, x, target_scale=1.0)


@pytest.mark.parametrize("method", ["set_scale", "set_far_weight"])
def test_what_heads_are_given_is_a_tensor_with_a_number_for_each(method):
    module = SchoenbAt(8, 4, 40, window=2)
    with pytest.raises(TypeError, match=r"for each head by a tensor \(num_heads,\), got 2\.0"):
        getattr(module, method)(2.0)
    for wrong in (torch.ones(3), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"must be of shape \(4,\), one for each head"):
            getattr(module, method)(wrong)


def test_calibrate_takes_one_mask_for_the_whole_batch():
    options = {"construction": "exact-low", "normalization": None, "center_keys": "learned", "seed": 0}
    one, each = (SchoenbAt(16, 4, 64, **options) for _ in range(2))
    q = torch.randn(2, 4, 10, 16)
    mask = (torch.arange(10) < 7)[None]
    one.calibrate(q, q, q, key_mask=mask)
    each.calibrate(q, q, q, key_mask=mask.expand(2, -1))
    torch.testing.assert_close(one.key_center, each.key_center)


@pytest.mark.parametrize(
    "options", [{"normalization": "batch"}, {"center_keys": "learned"}, {"separate_maps": True}]
)
@pytest.mark.parametrize("width", [1, 2 * WIDTH])
def test_rows_of_another_width_are_refused(options, width):
    module, value = SchoenbAt(WIDTH, HEADS, **options), torch.randn(2, HEADS, 5, WIDTH)
    rows = torch.randn(2, HEADS, 5, width)
    with pytest.raises(ValueError, match=f"made for head_dim = {WIDTH}, query and key have {width}"):
        module(rows, rows, value)


@pytest.mark.parametrize(
    ("shape", "advice"),
    [((2, 9, 4, 8), r"transpose\(-3, -2\)"), ((2, 9, 32), "MultiheadSchoenbAt"), ((2, 3, 9, 8), r"9, 8\)$")],
)
def test_a_layout_that_is_somebody_else_s_is_recognised(shape, advice):
    x = torch.randn(shape)
    with pytest.raises(ValueError, match=advice):
        SchoenbAt(8, 4)(x, x, x)


@pytest.mark.parametrize("window", [None, 0, 3])
def test_a_state_that_is_copied_stays_in_its_memory(window):
    attention = SchoenbAt(8, 2, 40, construction="exact-low", window=window, seed=0).eval()
    q, k, v = torch.randn(3, 2, 2, 9, 8).unbind()
    with torch.no_grad():
        whole = attention(q, k, v, is_causal=True)
        token = [x[..., :1, :].clone() for x in (q, k, v)]
        _, state = attention.step(*token)  # of the sizes that a token leaves
        _, prompt = attention.step(*(x[..., :5, :] for x in (q, k, v)))
        pointers = [x.data_ptr() for x in tensors_of(state)]
        state.copy_(prompt)
        for i in range(5, 9):
            for place, x in zip(token, (q, k, v), strict=True):
                place.copy_(x[..., i : i + 1, :])
            out, after = attention.step(*token, state)
            state.copy_(after)
            torch.testing.assert_close(out, whole[..., i : i + 1, :], rtol=1e-4, atol=1e-5)
    assert [x.data_ptr() for x in tensors_of(state)] == pointers
    assert state.count.tolist() == [9, 9]


def tensors_of(state):
    own = [x for x in vars(state).values() if isinstance(x, torch.Tensor)]
    return own + (tensors_of(state.far) if hasattr(state, "far") else [])


def test_a_state_of_another_size_or_kind_is_not_copied():
    features = MaclaurinFeatures(8, 40, seed=0)
    one, two = (RMFAState.zeros(features, batch, 2, 8) for batch in (1, 2))
    one.count += 1
    with pytest.raises(ValueError, match="a state of another size"):
        two.copy_(one)
    assert two.count.tolist() == [0, 0]
    with pytest.raises(TypeError, match="expected a RMFAState to copy, got RMFAWindowState"):
        one.copy_(RMFAWindowState.zeros(features, 3, 1, 2, 8))
