"""How far a result may be from the float64 oracle: rounding errors, from the dtype and the sizes that occur.

A sum of terms t is off by at most γ Σ|t|, where γ counts roundings. What a map's terms add up to in absolute
value is what the same map gives with the absolute values of its directions and inputs. Where that exceeds
the range of the dtype, and only there, a call may be refused as an overflow.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat import DotProductKernel, MaclaurinFeatures
from schoenbat.inputs import arrange, arrange_scale
from schoenbat.ops import dispatch
from schoenbat.ops.blocks import inner, monomials, weigh


class Expected(NamedTuple):
    out: Tensor  # float64
    error: Tensor  # how far from it a result may be; infinite where every digit may be lost
    overflows: bool  # whether something on the way may not fit the dtype


def expected_rmfa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: MaclaurinFeatures,
    *,
    dtype: torch.dtype,
    row_error: tuple[Tensor, Tensor] | None = None,
    scale: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Expected:
    """The specification in float64, for a result that is computed from inputs of `dtype`.

    `row_error` is how far the rows of query and key are off already, element by element.
    """
    q, k, v = (x.detach().double() for x in (query, key, value))
    scale = features.scale if scale is None else scale
    scale = scale.detach().double() if isinstance(scale, Tensor) else scale
    with torch.no_grad():
        inputs = arrange(q, k, v, key_mask, enable_gqa)
        factor = arrange_scale(scale, inputs.query, features.scale)
        feature_map = features.map(torch.float64)
        out = dispatch.attend(
            *inputs[:4], feature_map, factor, is_causal=is_causal, implementation="reference"
        ).reshape(*q.shape[:-1], v.shape[-1])
        off = (torch.zeros_like(q), torch.zeros_like(k)) if row_error is None else row_error
        wider = arrange(q.abs() + off[0], k.abs() + off[1], v.abs(), key_mask, enable_gqa)
        visible = dispatch._visible(inputs.query, inputs.key, inputs.mask, is_causal)
        error, overflows = _rmfa_error(inputs, wider, visible, features, factor, dtype)
        error = error.reshape(out.shape)
        error = error + 2 * torch.finfo(dtype).eps * out.abs() + torch.finfo(dtype).tiny
        # Where no digit is known, nor is it that the result fits.
        overflows = overflows or bool((out.abs() + error > _half_range(dtype)).any())
    return Expected(out, error, overflows)


def _rmfa_error(inputs, wider, visible, features, factor, dtype) -> tuple[Tensor, bool]:
    compute = torch.promote_types(dtype, torch.float32)
    eps, tiny = torch.finfo(compute).eps, torch.finfo(compute).tiny
    feature_map = features.map(torch.float64)
    blocks, weight, coefficients = (feature_map.blocks, feature_map.weight, feature_map.coefficients)
    constant, zeroth, slope = coefficients.view(-1, 1, 1, 1, 3).unbind(-1)
    positive = blocks._replace(
        **{name: getattr(blocks, name).abs() for name in ("linear", "quadratic", "tail")}
    )

    seen = visible.expand(inputs.query.shape[0], 1, 1, inputs.query.shape[-2], inputs.key.shape[-2])
    any_sees = seen.any(-2).unsqueeze(-1)
    key, value = (torch.where(any_sees, x, 0.0) for x in (inputs.key, inputs.value))
    wide_key, value_size = (torch.where(any_sees, x, 0.0) for x in (wider.key, wider.value))
    q, k = inputs.query * factor, key * feature_map.key_scale
    q_size, k_size = inputs.query.abs() * factor.abs(), key.abs() * feature_map.key_scale
    q_wide, k_wide = wider.query * factor.abs(), wide_key * feature_map.key_scale

    def scores(a: Tensor, b: Tensor, map_blocks) -> Tensor:
        return constant + inner(weigh(monomials(a, map_blocks), weight), monomials(b, map_blocks))

    def size_of(x: Tensor) -> float:
        return max((float(part.abs().max()) for part in monomials(x, positive) if part.numel()), default=0.0)

    sizes = torch.where(seen, scores(q_size, k_size, positive), 0.0)
    drift = torch.where(seen, scores(q_wide, k_wide, positive), 0.0) - sizes
    lost = torch.where(seen, 1.0, 0.0) * tiny * float(weight.abs().max() if weight.numel() else 0.0)
    lost = lost * (1 + size_of(q_size) + size_of(k_size)) * max(1, features.num_features)
    length, degree = inputs.key.shape[-2], max(features.degrees)
    gamma = eps * (length + features.num_features + (degree + 1) * (features.head_dim + 2) + 16)
    each = gamma * sizes + drift + lost

    count = seen.sum(-1, keepdim=True).double()
    averaging = seen / count.clamp(min=1)
    mean, mean_size = averaging @ value, averaging @ value_size
    denominator = torch.where(seen, scores(q, k, blocks), 0.0).sum(-1, keepdim=True)
    mean_logit = (q * (averaging @ k)).sum(-1, keepdim=True)
    logit_error = slope.abs() * (gamma * (q_wide * (averaging @ k_wide)).sum(-1, keepdim=True))
    logit_error = logit_error + slope.abs() * (
        (q_wide * (averaging @ k_wide)) - (q_size * (averaging @ k_size))
    ).sum(-1, True)
    floor = count * zeroth * (slope * mean_logit).clamp(-80.0, 0.0).exp()
    floor_error = floor * torch.expm1((logit_error + gamma).clamp(max=700.0))
    floored = torch.where(denominator < floor, floor, denominator)
    floored_error = each.sum(-1, keepdim=True) + gamma * count * constant + floor_error
    # Below half of the denominator the quotient's error grows in proportion; above, nothing is known.
    known = floored_error < floored / 2
    above = each @ value_size + mean_size * (each.sum(-1, keepdim=True) + floored_error)
    spread = torch.where(seen, scores(q, k, blocks), 0.0) @ value - denominator * mean
    error = 2 * (above + spread.abs() / floored.clamp(min=1e-300) * floored_error) / floored.clamp(min=1e-300)
    error = torch.where(known, error + gamma * mean_size, math.inf)
    error = torch.where(count > 0, error, 0.0)

    peak = max(
        size_of(q_wide),
        size_of(k_wide) * max(1.0, float(value_size.max()) if value_size.numel() else 1.0) * (length + 1),
        float((sizes @ value_size).max()) if sizes.numel() and value_size.numel() else 0.0,
        float(sizes.sum(-1).max()) if sizes.numel() else 0.0,
        float((q_wide * (averaging @ k_wide)).sum(-1).max()) if q_wide.numel() else 0.0,
    )
    peak *= max(1.0, float(weight.abs().max()) if weight.numel() else 1.0)
    return error, not peak < _half_range(compute)


def expected_exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: DotProductKernel,
    *,
    dtype: torch.dtype,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Expected | None:
    """``Σ f(s⟨q, k⟩) v / Σ f(s⟨q, k⟩)`` written out in float64; None where a logit reaches the radius."""
    inputs = arrange(*(x.detach().double() for x in (query, key, value)), key_mask, enable_gqa)
    q, k, v = inputs[:3]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    seen = dispatch._visible(q, k, inputs.mask, is_causal).expand(q.shape[0], 1, 1, q.shape[-2], k.shape[-2])
    logits, sizes = q @ k.mT * scale, q.abs() @ k.abs().mT * abs(scale)
    eps = torch.finfo(dtype).eps
    gamma = eps * (query.shape[-1] + 4)
    logit_error = gamma * sizes
    if kernel.name in ("exp", "trigh"):
        highest = (
            torch.where(seen, logits, -math.inf).amax(-1, keepdim=True).nan_to_num(0, 0, 0)
            if k.shape[-2]
            else 0.0
        )
        f = (logits - highest).clamp(max=0.0).exp()
        f_error = f * torch.expm1(2 * logit_error.clamp(max=300.0))
    else:
        if bool((seen & (logits + 2 * logit_error >= kernel.radius)).any()):
            return None
        f = kernel(logits)
        around = [kernel(logits + sign * logit_error) for sign in (-1, 1)]
        f_error = torch.stack([(x - f).abs() for x in around]).amax(0)
    f, f_error = (torch.where(seen, x, 0.0) for x in (f, f_error))
    f_error = f_error + eps * (k.shape[-2] + 8) * f.abs()
    has_keys = seen.any(-1, keepdim=True)
    total, total_error = f.sum(-1, keepdim=True), f_error.sum(-1, keepdim=True)
    safe = torch.where(has_keys, total, 1.0)
    out = torch.where(has_keys, (f @ v) / safe, 0.0)
    error = 2 * (f_error @ v.abs() + out.abs() * total_error) / safe.abs()
    error = torch.where(total_error < safe.abs() / 2, error, math.inf)
    error = (
        torch.where(has_keys, error, 0.0)
        + 2 * eps * out.abs()
        + torch.finfo(dtype).tiny * (1 + v.abs().amax() if v.numel() else 1)
    )
    compute = torch.promote_types(dtype, torch.float32)
    peak = [sizes, f.abs() @ v.abs(), f.abs().sum(-1), logits.abs() + logit_error]
    overflows = any(x.numel() and not float(x.max()) < _half_range(compute) for x in peak)
    overflows = overflows or bool(out.numel() and out.abs().max() > _half_range(dtype))
    shape = (*query.shape[:-1], value.shape[-1])
    return Expected(out.reshape(shape), error.expand(out.shape).reshape(shape), overflows)


def assert_within(got: Tensor, expected: Expected) -> None:
    """A result is finite wherever the oracle is, and as close to it as rounding allows."""
    assert got.shape == expected.out.shape, f"shape {tuple(got.shape)}, not {tuple(expected.out.shape)}"
    finite = expected.out.isfinite()
    assert not (got.isnan() & finite).any(), "NaN where the oracle is finite"
    off = torch.where(
        finite & expected.error.isfinite(), (got.double() - expected.out).abs() - expected.error, -1.0
    )
    if off.numel() and off.max() > 0:
        worst = int(off.argmax())
        raise AssertionError(
            f"{got.flatten()[worst]:.9g}, not {expected.out.flatten()[worst]:.9g} "
            f"± {expected.error.flatten()[worst]:.2g}"
        )


def _half_range(dtype: torch.dtype) -> float:
    """Products of a few such factors are formed on the way, in an order that is nobody's business."""
    return torch.finfo(dtype).max / 1e3
