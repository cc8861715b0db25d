"""Exact near, linear far: keys within ±w by the exponential itself, all others by features, one denominator.

    out_i = (Σ_near exp(l_ij) v_j + g·N_i) / (Σ_near exp(l_ij) + g·f_i),    l_ij = scale·⟨q_i, k_j⟩,

N and f are numerator and floored denominator of the feature map's attention to the far keys alone, g > 0 is a
weight for each head. The far keys are those at least w + 1 positions back and, unless causal, those at least
w + 1 positions ahead; each side is a running sum of its own, so that no near key is ever added and taken
away again. Near and far are brought together under the larger of the near keys' largest logit and log(g·f).

A factor exp(scale·⟨q, c⟩) common to a row cancels: subtracting one centre c from all keys changes only how
well the features do.

Shapes are those of `eager`; blocks of C rows come as a dimension of their own, ``(B, H, G, blocks, C, ·)``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schoenbat.ops.blocks import FeatureMap, inner, monomials, weigh
from schoenbat.ops.denominator import guard
from schoenbat.ops.near_and_far import Window
from schoenbat.ops.no_queries import of_no_query

_BLOCK = 64  # C
# A logit that stands for no key: as a float32 it can still be subtracted from any other.
_NOTHING = -1e30


class Far(NamedTuple):
    """What each row finds of its far keys; everything is a sum over them."""

    numerator: Tensor  # (B, H, G, n, d_v): Σ φ(q)·φ(k) v, the constant's part left out
    denominator: Tensor  # (B, H, G, n, 1)
    key_sum: Tensor  # (B, H, 1, n, d)
    value_sum: Tensor  # (B, H, 1, n, d_v)
    seen: Tensor  # (B, H, 1, n, 1): how many there are


class Carried(NamedTuple):
    """The far keys of all rows before a span of them."""

    features: Tensor  # (B, H, 1, 1, F, d_v + 1): Σ φ(k) (v, 1)ᵀ
    rows: Tensor  # (B, H, 1, 1, 1, d + d_v + 1): Σ (k, v, 1)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    window: Window,
) -> Tensor:
    """The specification: dense, in any dtype."""
    if not query.shape[-2]:
        return of_no_query(query, key, value)
    query, key = query * query_scale, key * feature_map.key_scale
    if mask is not None:  # 0 · NaN would let a masked key through
        key, value = torch.where(mask, key, 0.0), torch.where(mask, value, 0.0)
    at, of = torch.arange(query.shape[-2]) + window.first, torch.arange(key.shape[-2])
    behind = (at[:, None] - of).to(query.device)
    visible = behind >= 0 if window.is_causal else torch.ones_like(behind, dtype=torch.bool)
    visible = visible.expand(query.shape[0], 1, 1, -1, -1) if mask is None else visible & mask.mT
    near, far = visible & (behind.abs() <= window.width), visible & (behind.abs() > window.width)

    constant, zeroth, slope = feature_map.coefficients.view(-1, 1, 1, 1, 3).unbind(-1)
    far_query, far_key = window.far_rows(query, key)
    phi_query, phi_key = (monomials(x, feature_map.blocks) for x in (far_query, far_key))
    scores = torch.where(far, constant + inner(weigh(phi_query, feature_map.weight), phi_key), 0.0)
    count = far.sum(-1, keepdim=True)
    average = far / count.clamp(min=1).to(scores.dtype)
    mean_value, mean_logit = average @ value, (far_query * (average @ far_key)).sum(-1, True)
    total = scores.sum(-1, keepdim=True)
    floor = count * zeroth * (slope * mean_logit).clamp(-80.0, 0.0).exp()
    floored = torch.where(total < floor, floor, total)
    numerator = scores @ value + (floored - total) * mean_value

    logits = query @ key.mT
    top = torch.where(near, logits, 0.0).amax(-1, keepdim=True).detach()  # 0 at least: far weights shrink
    weights = torch.where(near, (logits - top).exp(), 0.0)
    gain = (window.log_weight - top).exp()
    denominator = weights.sum(-1, keepdim=True) + gain * floored
    return (weights @ value + gain * numerator) / torch.where(visible.any(-1, True), denominator, 1.0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    window: Window,
    before: Carried | None = None,
) -> Tensor:
    """The same in time and memory linear in n: near keys by bands of blocks, far ones by running sums.

    `before` holds keys that stand before all of `key`, far ones to every query.
    """
    if not query.shape[-2]:
        return of_no_query(query, key, value)
    dtype = feature_map.weight.dtype
    x = query.to(dtype) * query_scale
    key, value = key.to(dtype) * feature_map.key_scale, value.to(dtype)
    if mask is None:
        mask = torch.ones_like(key[:, :1, :, :, :1], dtype=torch.bool)
    key, value = torch.where(mask, key, 0.0), torch.where(mask, value, 0.0)
    near = _near(x, key, value, mask, window)
    far_x, far_key = window.far_rows(x, key)
    rows = torch.cat([far_key, value, mask.to(dtype).expand(*key.shape[:-1], 1)], dim=-1)
    widths = key.shape[-1], value.shape[-1], 1
    before = _nothing(rows, widths, feature_map) if before is None else before
    far = _past(far_x, rows, widths, window.width + 1 - window.first, feature_map, before)
    if not window.is_causal:
        nobody = _nothing(rows, widths, feature_map)
        ahead = _past(far_x.flip(-2), rows.flip(-2), widths, window.width + 1, feature_map, nobody)
        far = Far(*(one + other.flip(-2) for one, other in zip(far, ahead, strict=True)))
    return _merge(far_x, near, far, feature_map.coefficients, window.log_weight).to(query.dtype)


def _nothing(rows: Tensor, widths: tuple[int, int, int], feature_map: FeatureMap) -> Carried:
    lead, features = (*rows.shape[:2], 1, 1), feature_map.weight.shape[-1]
    return Carried(rows.new_zeros(*lead, features, widths[1] + 1), rows.new_zeros(*lead, 1, sum(widths)))


def _past(
    query: Tensor,
    rows: Tensor,  # (B, H, 1, n, d + d_v + 1): key, value, and 1 where the key takes part
    widths: tuple[int, int, int],
    lag: int,
    feature_map: FeatureMap,
    carried: Carried,
) -> Far:
    """Row i finds `carried` and the keys up to i − lag: causal attention to keys that come `lag` later."""
    rows = F.pad(rows, (0, 0, lag, 0))[..., : query.shape[-2], :]
    found = []
    for span in _spans(query, feature_map.weight.shape[-1] + _BLOCK):
        far, carried = _recomputed(
            _past_of_span, query[..., span, :], rows[..., span, :], widths, feature_map, carried
        )
        found.append(far)
    return Far(*(torch.cat(parts, dim=-2) for parts in zip(*found, strict=True)))


def _past_of_span(
    query: Tensor, rows: Tensor, widths: tuple[int, int, int], feature_map: FeatureMap, carried: Carried
) -> tuple[Far, Carried]:
    length = query.shape[-2]
    of_query = weigh(monomials(query, feature_map.blocks), feature_map.weight)
    of_key = monomials(rows[..., : widths[0]], feature_map.blocks)
    phi_query, phi_key = (_in_blocks(torch.cat(phi, dim=-2).mT) for phi in (of_query, of_key))
    rows = _in_blocks(rows)
    value = rows[..., widths[0] :]  # (v, 1)
    sums, features = _running(carried.features, phi_key.mT @ value)
    past, totals = _running(carried.rows, rows.sum(-2, keepdim=True))

    scores = (phi_query @ phi_key.mT).tril()
    above, below = (scores @ value + phi_query @ sums).split([widths[1], 1], dim=-1)
    far = Far(above, below, *(past + rows.cumsum(-2)).split(widths, dim=-1))
    return Far(*(part.flatten(-3, -2)[..., :length, :] for part in far)), Carried(features, totals)


def _running(carried: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """What comes before each block, and before the block after the last."""
    running = torch.cat([carried, totals], dim=3).cumsum(3)
    return running[:, :, :, :-1], running[:, :, :, -1:]


class Near(NamedTuple):
    """What each row finds of its near keys, divided by exp(top)."""

    numerator: Tensor  # (B, H, G, n, d_v)
    denominator: Tensor  # (B, H, G, n, 1)
    top: Tensor  # (B, H, G, n, 1): the largest logit


def _near(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, window: Window) -> Near:
    """Each block of queries sees a stretch of keys that holds the windows of all its rows."""
    ahead = 0 if window.is_causal else window.width
    stretch = window.width + _BLOCK + ahead
    whole = _whole(query.shape[-2])
    missing = whole + ahead - (key.shape[-2] - window.first)
    padding = 0, 0, window.width - window.first, missing
    key, value, mask = (F.pad(x, padding) for x in (key, value, mask))
    found = []
    for span in _spans(query, stretch):
        around = slice(span.start, min(span.stop, whole) + stretch - _BLOCK)
        near = _recomputed(
            _near_of_span,
            query[..., span, :],
            key[..., around, :].unfold(-2, stretch, _BLOCK),
            value[..., around, :].unfold(-2, stretch, _BLOCK),
            mask[..., around, :].unfold(-2, stretch, _BLOCK),
            window.width + ahead,
        )
        found.append(near)
    return Near(*(torch.cat(parts, dim=-2) for parts in zip(*found, strict=True)))


def _near_of_span(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, reach: int) -> Near:
    """Keys, values and mask come as ``(B, H, 1, blocks, d, stretch)``; row r sees columns r to r + reach."""
    length, stretch = query.shape[-2], key.shape[-1]
    ahead = torch.arange(stretch, device=key.device) - torch.arange(_BLOCK, device=key.device)[:, None]
    visible = mask & (ahead >= 0) & (ahead <= reach)
    logits = torch.where(visible, _in_blocks(query) @ key, -torch.inf)
    top = logits.detach().amax(-1, keepdim=True).clamp(min=_NOTHING)
    weights = (logits - top).exp()
    near = Near(weights @ value.mT, weights.sum(-1, keepdim=True), top)
    return Near(*(part.flatten(-3, -2)[..., :length, :] for part in near))


def _merge(query: Tensor, near: Near, far: Far, coefficients: Tensor, log_weight: Tensor) -> Tensor:
    divisor = far.seen.clamp(min=1)
    mean_logit = (query * far.key_sum).sum(-1, keepdim=True) / divisor
    guarded = guard(far.denominator, mean_logit, far.seen, coefficients)
    # Whatever the floor adds to the denominator, or the constant, weighs all far values alike.
    constant = (guarded.floored - far.denominator) / divisor
    numerator = far.numerator + constant * far.value_sum

    has_far = far.seen > 0
    of_far = torch.where(has_far, log_weight + guarded.floored.detach().log(), _NOTHING)
    top = torch.maximum(near.top, of_far).detach()
    to_near = (near.top - top).exp()
    to_far = torch.where(has_far, log_weight - top, _NOTHING).exp()
    denominator = to_near * near.denominator + to_far * guarded.floored
    denominator = torch.where(top > _NOTHING, denominator, 1.0)
    return (to_near * near.numerator + to_far * numerator) / denominator


def _in_blocks(rows: Tensor) -> Tensor:
    """``(..., n, m) -> (..., blocks, C, m)``, with zeros after the last row."""
    whole = _whole(rows.shape[-2])
    return F.pad(rows, (0, 0, 0, whole - rows.shape[-2])).unflatten(-2, (whole // _BLOCK, _BLOCK))


def _whole(length: int) -> int:
    """The next multiple of a block."""
    return (length + _BLOCK - 1) // _BLOCK * _BLOCK


def _spans(query: Tensor, per_row: int) -> list[slice]:
    """Cut the rows so that what is made for a span stays in the cache; a compiler gets them all at once."""
    whole = _whole(query.shape[-2])
    if torch.compiler.is_compiling():
        return [slice(0, whole)]
    budget = 2**20 if query.device.type == "cpu" else 2**27
    heads = max(1, query.shape[0] * query.shape[1] * query.shape[2])
    step = max(_BLOCK, budget // (heads * per_row) // _BLOCK * _BLOCK)
    return [slice(start, start + step) for start in range(0, whole, step)]


def _recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call, and keep nothing but the arguments for the backward pass, which calls again.

    A compiler decides for itself what to keep, and under torch.func transforms nothing can be left out.
    """
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if traced or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
