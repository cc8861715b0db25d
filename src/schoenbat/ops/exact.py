"""Exact kernelized attention, quadratic in n: the oracle, and the baseline to be faster than.

Shapes are those of `eager`, with `visible` as in `reference`.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from schoenbat.kernels import DotProductKernel
from schoenbat.ops.flex import compiled_flex
from schoenbat.ops.keeping import is_concrete, is_transformed
from schoenbat.precision import at_least_float32


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kernel: DotProductKernel,
    scale: float | Tensor,  # a float, or (H, G, 1, 1)
    *,
    is_causal: bool,
) -> Tensor:
    """``Σ_j f(s·⟨q, k_j⟩) v_j / Σ_j f(s·⟨q, k_j⟩)``; a row without keys gives zeros."""
    dtype = at_least_float32(query.dtype)
    if isinstance(scale, Tensor):
        query, scale = query * scale.to(dtype), 1.0
    # Keys that take no part must not reach a product: 0 · NaN is NaN.
    if mask is not None:
        key, value = torch.where(mask, key, 0.0), torch.where(mask, value, 0.0)
    visible = _visible(query, key, mask, is_causal)
    has_keys = everywhere = None
    if visible is not None:
        has_keys = visible.any(-1, keepdim=True)
        everywhere = visible | ~has_keys  # a softmax over nothing has NaN gradients
    if kernel.is_exponential:
        out = _softmax(query.to(key.dtype), key, value, everywhere, scale)
    elif query.is_cuda and dtype != torch.float64:
        out = _flex(query.to(key.dtype), key, value, everywhere, kernel, scale)
    else:
        out = _dense(query.to(dtype) * scale, key.to(dtype), value.to(dtype), visible, kernel)
    out = out.to(value.dtype)
    return out if has_keys is None else torch.where(has_keys, out, 0.0)


def _visible(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """None where every key is visible to every query; else bool ``(B, 1, 1, n_q or 1, n_k)``."""
    if key.shape[-2] == 0:
        return torch.zeros(1, 1, 1, 1, 0, dtype=torch.bool, device=key.device)
    visible = None if mask is None else mask.mT
    if is_causal:
        lengths = query.shape[-2], key.shape[-2]
        causal = torch.ones(lengths, dtype=torch.bool, device=key.device).tril(lengths[1] - lengths[0])
        visible = causal[None, None, None] if visible is None else visible & causal
    return visible


def _softmax(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    if is_transformed():  # PyTorch's own has no forward-mode derivatives, and no second ones
        dtype = at_least_float32(query.dtype)
        logits = query.to(dtype) @ key.to(dtype).mT * scale
        logits = logits if visible is None else torch.where(visible, logits, -math.inf)
        return logits.softmax(-1) @ value.to(dtype)
    groups = query.shape[2]
    q, k, v = (x.flatten(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=None if visible is None else visible[:, 0], scale=scale, enable_gqa=groups > 1
    )
    return _with_nan(out.unflatten(1, (-1, groups)), query, key, scale)


def _with_nan(out: Tensor, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """`out` with NaN where PyTorch gives zeros on a CPU: for rows of which no logit is a number that fits."""
    if out.device.type != "cpu" or not key.numel() or not is_concrete(out, query, key):
        return out
    zeros = out.detach()[..., :1] == 0
    if not zeros.any():
        return out
    dtype = at_least_float32(query.dtype)
    largest = key.detach().abs().amax((-2, -1), keepdim=True).to(dtype)
    bound = query.detach().abs().sum(-1, keepdim=True, dtype=dtype) * largest * abs(scale)
    return torch.where((out == 0).all(-1, keepdim=True) & ~bound.isfinite(), torch.nan, out)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, kernel: DotProductKernel
) -> Tensor:
    logits = query @ key.mT
    if visible is not None:
        logits = torch.where(visible, logits, 0.0)
    _refuse_outside_radius(logits, kernel)
    scores = kernel(logits)
    if visible is None:
        return scores @ value / scores.sum(-1, keepdim=True)
    scores = torch.where(visible, scores, 0.0)
    return scores @ value / torch.where(visible.any(-1, keepdim=True), scores.sum(-1, keepdim=True), 1.0)


def _refuse_outside_radius(logits: Tensor, kernel: DotProductKernel) -> None:
    """Only where looking costs nothing: on a GPU it would synchronise, and the rows become NaN instead."""
    # First, since torch.compile may have made a symbol of the radius.
    if not is_concrete(logits) or logits.device.type != "cpu":
        return
    if math.isinf(kernel.radius) or not logits.numel():
        return
    largest = logits.detach().max().item()
    if math.isnan(largest):  # one row's NaN must not hide what another row has
        largest = logits.detach().nan_to_num(-math.inf, math.inf, -math.inf).max().item()
    if largest >= kernel.radius:
        raise ValueError(
            f"logit {largest:.6g} is outside the radius {kernel.radius:g} of kernel {kernel.name!r}; "
            "normalise query and key to unit rows and choose a smaller scale"
        )


def _flex(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, kernel: DotProductKernel, scale: float
) -> Tensor:
    """FlexAttention with ``score_mod = log f``: no n × n matrix of scores is kept."""
    groups = query.shape[2]
    flat = (x.flatten(1, 2) for x in (query, key, value))
    if visible is None:
        score_mod = _log_kernel(kernel)
    else:
        shape = query.shape[0], 1, 1, query.shape[-2], key.shape[-2]
        score_mod = _masked(_log_kernel(kernel), visible.expand(shape)[:, 0, 0])
    # Every kernel is a score_mod of its own: at the usual limit Dynamo would give up and form the scores.
    with torch._dynamo.config.patch(recompile_limit=256):
        out = compiled_flex()(*flat, score_mod=score_mod, scale=scale, enable_gqa=groups > 1)
    return out.unflatten(1, (-1, groups))


@cache
def _log_kernel(kernel: DotProductKernel) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, *index: Tensor) -> Tensor:
        return kernel.log(score)

    return score_mod


def _masked(score_mod: Callable[..., Tensor], visible: Tensor) -> Callable[..., Tensor]:
    def masked(score: Tensor, b: Any, h: Any, row: Any, column: Any) -> Tensor:
        return torch.where(visible[b, row, column], score_mod(score, b, h, row, column), -float("inf"))

    return masked
