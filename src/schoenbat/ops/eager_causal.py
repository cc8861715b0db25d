"""Causal attention by a feature map in plain PyTorch: chunks one after the other, the past as sums.

Inside a chunk the scores are formed, C × C; what lies before it is read from the sums. With ``e`` the
weight that the constant must have for the denominator to reach its floor f,

    out_i = (Σ_{j ≤ i} (φ(q_i)·φ(k_j) + e_i) v_j) / f_i,     e_i = (f_i − Σ_{j ≤ i} φ(q_i)·φ(k_j)) / count_i,

which is v̄ + (numerator − denominator·v̄) / f. Shapes are those of `eager`; query and key have the same length.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.blocks import (
    Blocks,
    Evaluated,
    Evaluator,
    Monomials,
    add,
    add_outer_,
    apply_to_rows,
    dot_rows,
    from_rows,
    inner,
    sum_over_heads,
    sum_over_rows,
    total_over_rows,
    weigh,
)
from schoenbat.ops.denominator import Denominator, guard, guard_backward
from schoenbat.ops.eager import keep, sum_of_products
from schoenbat.ops.sums import Sums

_CHUNK = 128


class Inputs(NamedTuple):
    """What a pass over the sequence takes, apart from the sums it starts from."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    seen: Tensor  # int64 (B, 1, 1, 1, 1): how many keys came before
    blocks: Blocks
    weight: Tensor  # (M, F)
    coefficients: Tensor  # (M, 3)
    query_scale: Tensor  # (H, G, 1, 1)
    key_scale: float


class Chunk(NamedTuple):
    """Everything about one chunk that does not depend on the past."""

    value: Tensor  # zeros where masked
    at_query: Evaluated  # of the scaled queries
    at_key: Evaluated  # of the scaled keys, zeros where masked
    phi_query: Monomials  # weighted
    scores: Tensor  # (B, H, G, C, C), zero above the diagonal
    visible: Tensor  # (B, 1, 1, C, C): 1 where the key takes part for the query
    seen: Tensor  # (B, 1, 1, C, 1): how many keys each row sees


class Rows(NamedTuple):
    """What one chunk's rows find when they look at their whole past."""

    numerator: Tensor  # (B, H, G, C, d_v), the constant's part left out
    denominator: Tensor  # (B, H, G, C, 1), likewise
    key_mean: Tensor  # (B, H, 1, C, d)
    value_mean: Tensor  # (B, H, 1, C, d_v)
    mean_logit: Tensor
    guarded: Denominator
    constant: Tensor  # e


def scan(inputs: Inputs, sums: Sums) -> tuple[Tensor, Sums]:
    """Outputs of all rows, and the sums after the last."""
    rows = []
    seen = inputs.seen
    evaluator = Evaluator(inputs.blocks)
    for span in _spans(inputs.query):
        chunk = _chunk(inputs, evaluator, span, seen)
        found = _look_back(chunk, sums, inputs.coefficients)
        out = _output(found, chunk.seen)
        rows.append(out.to(inputs.query.dtype))
        sums, seen = _advance(chunk, sums), seen + _new_keys(inputs, span)
    return torch.cat(rows, dim=-2), sums


class SmallGradients(NamedTuple):
    weight: Tensor
    coefficients: Tensor
    query_scale: Tensor


def scan_backward(
    grad_out: Tensor, grad_sums: Sums, inputs: Inputs, sums: Sums, evaluator: Evaluator
) -> tuple[Tensor, Tensor, Tensor, SmallGradients, Sums]:
    """Gradients of query, key, value, the small tensors and the first sums; the map's go to the evaluator.

    Two passes: forward for what needs the past (queries), backward for what needs the future (keys, values).
    """
    grad_query, small, rows = _query_pass(grad_out, inputs, sums, evaluator)
    grad_key, grad_value, first = _key_pass(grad_out, grad_sums, inputs, rows, evaluator)
    return grad_query, grad_key, grad_value, small, first


class _RowGradients(NamedTuple):
    """Columns of one chunk that the pass for the keys needs from the pass for the queries."""

    seen: Tensor
    floored: Tensor
    constant: Tensor
    denominator: Tensor  # gradient
    mean_logit: Tensor  # gradient, divided by the count


def _query_pass(
    grad_out: Tensor, inputs: Inputs, sums: Sums, evaluator: Evaluator
) -> tuple[Tensor, SmallGradients, list[_RowGradients]]:
    blocks, seen = inputs.blocks, inputs.seen
    grad_query = torch.empty_like(inputs.query)
    small = SmallGradients(
        *(torch.zeros_like(t) for t in (inputs.weight, inputs.coefficients, inputs.query_scale))
    )
    rows = []
    for span in _spans(inputs.query):
        chunk = _chunk(inputs, evaluator, span, seen)
        found = _look_back(chunk, sums, inputs.coefficients)
        floored = found.guarded.floored
        grad = grad_out[..., span, :].to(floored.dtype) / floored
        along_mean = (grad * found.value_mean).sum(-1, keepdim=True)
        grad_floored = along_mean - (grad * _output(found, chunk.seen)).sum(-1, keepdim=True)
        grad_total, grad_mean_logit, more = guard_backward(
            grad_floored, found.guarded, found.mean_logit, chunk.seen, inputs.coefficients, evaluator.train
        )
        grad_denominator = grad_total - along_mean
        grad_scores = (grad @ chunk.value.mT + grad_denominator).tril()

        inside = tuple(part @ grad_scores.mT for part in chunk.at_key.phi)
        grad_phi = add(inside, from_rows(blocks, sums.feature_value, grad))
        grad_phi = add_outer_(grad_phi, sums.feature_sum, grad_denominator)
        if evaluator.train:
            per_monomial = dot_rows(grad_phi, chunk.at_query.phi)
            small.weight.add_(sum_over_heads(inputs.weight, per_monomial))
        grad_x = evaluator.backward(chunk.at_query, weigh(grad_phi, inputs.weight))
        grad_x = grad_x + grad_mean_logit * found.key_mean

        small.coefficients.add_(more)
        small.query_scale.add_(sum_of_products(grad_x, inputs.query[..., span, :].to(grad_x.dtype)))
        grad_query[..., span, :] = grad_x * inputs.query_scale
        to_mean = grad_mean_logit / chunk.seen.clamp(min=1)
        rows.append(_RowGradients(seen, floored, found.constant, grad_denominator, to_mean))
        sums, seen = _advance(chunk, sums), seen + _new_keys(inputs, span)
    return grad_query, small, rows


def _key_pass(
    grad_out: Tensor, future: Sums, inputs: Inputs, rows: list[_RowGradients], evaluator: Evaluator
) -> tuple[Tensor, Tensor, Sums]:
    grad_key, grad_value = torch.empty_like(inputs.key), torch.empty_like(inputs.value)
    for span, row in reversed(list(zip(_spans(inputs.query), rows, strict=True))):
        chunk = _chunk(inputs, evaluator, span, row.seen)
        grad = grad_out[..., span, :].to(row.floored.dtype) / row.floored
        grad_scores = (grad @ chunk.value.mT + row.denominator).tril()
        scores = (chunk.scores + row.constant).tril()
        along_query = row.mean_logit * chunk.at_query.x
        not_before = torch.ones_like(scores[:1, :1, :1]).tril().mT

        grad_phi = tuple(_over_groups(part @ grad_scores) for part in chunk.phi_query)
        grad_phi = add(grad_phi, from_rows(inputs.blocks, future.feature_value, chunk.value))
        grad_phi = add_outer_(grad_phi, future.feature_sum, torch.ones_like(chunk.value[..., :1]))
        grad_x = evaluator.backward(chunk.at_key, grad_phi)
        grad_x = grad_x + _over_groups(not_before @ along_query) + future.key_sum
        grad_v = _over_groups(scores.mT @ grad) + future.value_sum
        grad_v = grad_v + apply_to_rows(chunk.at_key.phi, future.feature_value)
        grad_key[..., span, :] = keep(inputs.mask, span, grad_x * inputs.key_scale)
        grad_value[..., span, :] = keep(inputs.mask, span, grad_v)
        future = Sums(
            future.feature_value + _over_groups(sum_over_rows(chunk.phi_query, grad)),
            future.feature_sum + _over_groups(sum_over_rows(chunk.phi_query, row.denominator)),
            future.key_sum + _over_groups(along_query.sum(-2, keepdim=True)),
            future.value_sum + _over_groups(row.constant.mT @ grad),
        )
    return grad_key, grad_value, future


def _spans(x: Tensor) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, max(x.shape[-2], 1), _CHUNK))


def _over_groups(x: Tensor) -> Tensor:
    return x.sum(2, keepdim=True)


def _new_keys(inputs: Inputs, span: slice) -> Tensor | int:
    if inputs.mask is not None:
        return inputs.mask[..., span, :].sum(-2, keepdim=True)
    return inputs.key[..., span, :].shape[-2]


def _chunk(inputs: Inputs, evaluator: Evaluator, span: slice, seen: Tensor) -> Chunk:
    dtype, mask = inputs.weight.dtype, inputs.mask
    query = inputs.query[..., span, :] * inputs.query_scale
    key = keep(mask, span, inputs.key[..., span, :].to(dtype) * inputs.key_scale)
    value = keep(mask, span, inputs.value[..., span, :].to(dtype))
    length = key.shape[-2]
    visible = key.new_ones(key.shape[0], 1, 1, length, length).tril()
    if mask is not None:
        visible = visible * mask[..., span, :].mT
    at_query, at_key = evaluator.evaluate(query), evaluator.evaluate(key)
    phi_query = weigh(at_query.phi, inputs.weight)
    scores = inner(phi_query, at_key.phi) * visible
    seen = seen + visible.sum(-1, keepdim=True)
    return Chunk(value, at_query, at_key, phi_query, scores, visible, seen)


def _look_back(chunk: Chunk, sums: Sums, coefficients: Tensor) -> Rows:
    divisor = chunk.seen.clamp(min=1)
    key_mean = (sums.key_sum + chunk.visible @ chunk.at_key.x) / divisor
    value_mean = (sums.value_sum + chunk.visible @ chunk.value) / divisor
    numerator = chunk.scores @ chunk.value + apply_to_rows(chunk.phi_query, sums.feature_value)
    denominator = chunk.scores.sum(-1, keepdim=True) + apply_to_rows(chunk.phi_query, sums.feature_sum)
    mean_logit = (chunk.at_query.x * key_mean).sum(-1, keepdim=True)
    guarded = guard(denominator, mean_logit, chunk.seen, coefficients)
    constant = torch.where(chunk.seen > 0, guarded.floored - denominator, 0.0) / divisor
    return Rows(numerator, denominator, key_mean, value_mean, mean_logit, guarded, constant)


def _output(found: Rows, seen: Tensor) -> Tensor:
    return (found.numerator + found.constant * seen * found.value_mean) / found.guarded.floored


def _advance(chunk: Chunk, sums: Sums) -> Sums:
    return Sums(
        sums.feature_value + sum_over_rows(chunk.at_key.phi, chunk.value),
        sums.feature_sum + total_over_rows(chunk.at_key.phi),
        sums.key_sum + chunk.at_key.x.sum(-2, keepdim=True),
        sums.value_sum + chunk.value.sum(-2, keepdim=True),
    )
