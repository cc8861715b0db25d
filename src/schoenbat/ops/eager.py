"""Attention by a feature map in plain PyTorch, a cache-sized chunk of the sequence at a time, on any device.

Bidirectional attention is `summarize` (the keys and values, as sums over the sequence) and `read` (one query
row at a time against those sums). Nothing of size n·F outlives a chunk, in the backward pass either: features
are computed again there. The functions that end in `_backward` are written by hand for that reason; the
forward functions are ordinary differentiable PyTorch.

Shapes: query ``(B, H, G, n_q, d)``, key ``(B, H, 1, n_k, d)``, value ``(B, H, 1, n_k, d_v)``, mask None or
bool ``(B, 1, 1, n_k, 1)``; what belongs to a row is a column ``(B, H, G, n, 1)``; monomials as in `blocks`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.blocks import (
    Blocks,
    Evaluator,
    add_outer_,
    apply_to_rows,
    dot,
    from_rows,
    product,
)
from schoenbat.ops.denominator import guard, guard_backward
from schoenbat.ops.spans import spans
from schoenbat.ops.sums import key_count
from schoenbat.precision import at_least_float32


class Summary(NamedTuple):
    """What bidirectional attention keeps of the keys and values."""

    feature_value: Tensor  # (B, H, 1, F, d_v): Σ φ(k) (v − v̄)ᵀ; centred, so nothing is lost to a large mean
    feature_sum: Tensor  # (B, H, 1, F, 1): Σ φ(k)
    key_mean: Tensor  # (B, H, 1, 1, d): of the scaled keys
    value_mean: Tensor  # (B, H, 1, 1, d_v)


def keep(mask: Tensor | None, span: slice, x: Tensor) -> Tensor:
    """Zeros for masked rows: a zero key has no monomials, and what it held (NaN, too) is gone."""
    return x if mask is None else torch.where(mask[..., span, :], x, 0.0)


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """``Σ a·b`` over batch, rows and columns, for each head: ``(B, H, G, n, d) -> (H, G, 1, 1)``."""
    return (a * b).sum((0, -2, -1))[..., None, None]


def summarize(key: Tensor, value: Tensor, mask: Tensor | None, blocks: Blocks, key_scale: float) -> Summary:
    """Keys and values as sums, in one pass: centred on the first chunk's mean, then on the whole mean."""
    divisor = key_count(key, mask).clamp(min=1)
    first = next(spans(key, blocks.num_factors))
    values = keep(mask, first, value[..., first, :]).sum(-2, True, dtype=at_least_float32(key.dtype))
    centre = values / divisor.clamp(max=max(1, value[..., first, :].shape[-2]))

    evaluator = Evaluator(blocks)
    totals: list[Tensor] = []
    for span in spans(key, blocks.num_factors):
        x, centred = _key_chunk(key, value, mask, span, centre, key_scale)
        phi = evaluator.evaluate(x).phi
        parts = [product(part, centred) for part in phi]
        parts += [part.sum(-1, keepdim=True) for part in phi]
        parts += [x.sum(-2, keepdim=True), centred.sum(-2, keepdim=True)]
        totals = [a.add_(b) for a, b in zip(totals, parts, strict=True)] if totals else parts
    *sums, key_sum, beside = totals
    feature_value, feature_sum = (torch.cat(p, -2) for p in (sums[: len(phi)], sums[len(phi) :]))
    shift = beside / divisor
    # Without keys there is no mean: zeros.
    value_mean = torch.where(key_count(key, mask) > 0, centre + shift, 0.0)
    return Summary(feature_value - feature_sum @ shift, feature_sum, key_sum / divisor, value_mean)


def summarize_backward(
    grad: Summary,
    summary: Summary,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    evaluator: Evaluator,
    key_scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of key and value; those of the map are added up in the evaluator."""
    divisor = key_count(key, mask).clamp(min=1)
    # Each value reaches the mean, and through it every centred value.
    to_value_mean = (grad.value_mean - summary.feature_sum.mT @ grad.feature_value) / divisor
    to_key_mean = grad.key_mean * key_scale / divisor
    grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
    for span in spans(key, evaluator.blocks.num_factors):
        x, centred = _key_chunk(key, value, mask, span, summary.value_mean, key_scale)
        at = evaluator.evaluate(x)
        grad_phi = from_rows(evaluator.blocks, grad.feature_value, centred)
        grad_phi = add_outer_(grad_phi, grad.feature_sum, torch.ones_like(x[..., :1]))
        grad_x = evaluator.backward(at, grad_phi)
        grad_v = apply_to_rows(at.phi, grad.feature_value)
        torch.add(to_key_mean, grad_x, alpha=key_scale, out=grad_key[..., span, :])
        torch.add(grad_v, to_value_mean, out=grad_value[..., span, :])
        if mask is not None:
            grad_key[..., span, :].masked_fill_(~mask[..., span, :], 0.0)
            grad_value[..., span, :].masked_fill_(~mask[..., span, :], 0.0)
    return grad_key, grad_value


def _key_chunk(
    key: Tensor, value: Tensor, mask: Tensor | None, span: slice, value_mean: Tensor, key_scale: float
) -> tuple[Tensor, Tensor]:
    x = keep(mask, span, key[..., span, :].to(value_mean.dtype) * key_scale)
    return x, keep(mask, span, value[..., span, :] - value_mean)


def read(
    query: Tensor,
    summary: Summary,
    count: Tensor,  # (B, 1, 1, 1, 1), in the summary's dtype
    blocks: Blocks,
    coefficients: Tensor,
    query_scale: Tensor,  # (H, G, 1, 1)
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Numerator and denominator of each query chunk by chunk; the output is v̄ plus their quotient.

    The summary's features carry their weights already.
    """
    evaluator = Evaluator(blocks)
    for span in spans(query, blocks.num_factors):
        x = query[..., span, :] * query_scale
        phi = evaluator.evaluate(x).phi
        denominator, mean_logit = apply_to_rows(phi, summary.feature_sum), product(x, summary.key_mean.mT)
        guarded = guard(denominator, mean_logit, count, coefficients)
        yield span, apply_to_rows(phi, summary.feature_value), guarded.floored


def read_backward(
    grad_out: Tensor,
    query: Tensor,
    summary: Summary,
    count: Tensor,
    coefficients: Tensor,
    query_scale: Tensor,
    evaluator: Evaluator,
    train_scale: bool,
) -> tuple[Tensor, Summary, Tensor, Tensor]:
    """Gradients of query, summary, coefficients and query_scale; the map's are added up in the evaluator.

    Those of coefficients and scale stay zero where they are not trained.
    """
    grad_query = torch.empty_like(query)
    to_coefficients, to_scale = torch.zeros_like(coefficients), torch.zeros_like(query_scale)
    totals: list[Tensor] = []
    for span in spans(query, evaluator.blocks.num_factors):
        raw, grad = query[..., span, :].to(count.dtype), grad_out[..., span, :].to(count.dtype)
        at = evaluator.evaluate(raw * query_scale)
        mean_logit = product(at.x, summary.key_mean.mT)
        guarded = guard(apply_to_rows(at.phi, summary.feature_sum), mean_logit, count, coefficients)

        grad_numerator = grad / guarded.floored
        grad_phi = from_rows(evaluator.blocks, summary.feature_value, grad_numerator)
        # ⟨grad, numerator⟩ / f is the same sum taken over the features: no product with the sums is repeated.
        grad_floored = dot(at.phi, grad_phi) / -guarded.floored
        grad_total, grad_mean_logit, more = guard_backward(
            grad_floored, guarded, mean_logit, count, coefficients, evaluator.train
        )
        grad_x = evaluator.backward(at, add_outer_(grad_phi, summary.feature_sum, grad_total))
        grad_x.addcmul_(grad_mean_logit, summary.key_mean)
        torch.mul(grad_x, query_scale, out=grad_query[..., span, :])
        to_coefficients += more
        if train_scale:
            to_scale += sum_of_products(grad_x, raw)

        both = torch.cat([grad_numerator, grad_total], dim=-1)
        parts = [product(part, both) for part in at.phi]
        parts += [grad_mean_logit.mT @ at.x, grad.sum(-2, keepdim=True)]
        totals = [a.add_(b) for a, b in zip(totals, parts, strict=True)] if totals else parts
    *sums, to_key_mean, to_value_mean = (total.sum(2, keepdim=True) for total in totals)
    to_feature_value = torch.cat([part[..., :-1] for part in sums], dim=-2)
    to_feature_sum = torch.cat([part[..., -1:] for part in sums], dim=-2)
    to_summary = Summary(to_feature_value, to_feature_sum, to_key_mean, to_value_mean)
    return grad_query, to_summary, to_coefficients, to_scale
