"""Causal attention by a feature map in plain PyTorch: chunk by chunk, the past as sums.

Inside a chunk the scores are formed, C × C; what lies before it is read from the sums. With ``e`` the
weight that the constant must have for the denominator to reach its floor f,

    out_i = (Σ_{j ≤ i} (φ(q_i)·φ(k_j) + e_i) v_j) / f_i,     e_i = (f_i − Σ_{j ≤ i} φ(q_i)·φ(k_j)) / count_i,

which is v̄ + (numerator − denominator·v̄) / f. As many chunks as fit the cache are gone through at once: K of
them are B·K rows of the batch. Shapes are those of `eager`; query and key have the same length.
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
from schoenbat.ops.spans import rows_at_once
from schoenbat.ops.sums import Sums, key_count

_CHUNK = 128
# Times as much is formed of a row as in `eager`: features of queries and keys, scores, sums for each chunk.
_FORMED = 4
_ALL = slice(None)


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
    """Everything about chunks that does not depend on the past."""

    value: Tensor  # zeros where masked
    at_query: Evaluated  # of the scaled queries
    at_key: Evaluated  # of the scaled keys, zeros where masked
    phi_query: Monomials  # weighted
    scores: Tensor  # (B·K, H, G, C, C), zero above the diagonal
    seen: Tensor  # (B·K, 1, 1, C, 1): how many keys each row sees


class Rows(NamedTuple):
    """What the rows of chunks find when they look at their whole past."""

    numerator: Tensor  # (B·K, H, G, C, d_v), the constant's part left out
    denominator: Tensor  # (B·K, H, G, C, 1), likewise
    key_mean: Tensor  # (B·K, H, 1, C, d)
    value_mean: Tensor  # (B·K, H, 1, C, d_v)
    mean_logit: Tensor
    guarded: Denominator
    constant: Tensor  # e


def scan(inputs: Inputs, sums: Sums) -> tuple[Tensor, Sums]:
    """Outputs of all rows, and the sums after the last."""
    rows = []
    seen = inputs.seen
    evaluator = Evaluator(inputs.blocks)
    for span in _spans(inputs.query):
        parts, seen = _cut(inputs, span, seen)
        chunk = _chunk(parts, evaluator)
        before, sums = _accumulate(sums, _own_sums(chunk))
        out = _output(_look_back(chunk, before, inputs.coefficients))
        rows.append(_joined(out.to(inputs.query.dtype), span, len(inputs.query)))
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
    """Columns of chunks that the pass for the keys needs from the pass for the queries."""

    seen: Tensor  # (B, 1, 1, 1, 1): how many keys came before the first chunk
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
        parts, seen_after = _cut(inputs, span, seen)
        chunk = _chunk(parts, evaluator)
        before, sums = _accumulate(sums, _own_sums(chunk))
        found = _look_back(chunk, before, inputs.coefficients)
        floored = found.guarded.floored
        grad = _chunks(grad_out, span).to(floored.dtype) / floored
        along_mean = (grad * found.value_mean).sum(-1, keepdim=True)
        grad_floored = along_mean - (grad * _output(found)).sum(-1, keepdim=True)
        grad_total, grad_mean_logit, more = guard_backward(
            grad_floored, found.guarded, found.mean_logit, chunk.seen, inputs.coefficients, evaluator.train
        )
        grad_denominator = grad_total - along_mean
        grad_scores = (grad @ chunk.value.mT + grad_denominator).tril_()

        inside = tuple(part @ grad_scores.mT for part in chunk.at_key.phi)
        grad_phi = add(inside, from_rows(blocks, before.feature_value, grad))
        grad_phi = add_outer_(grad_phi, before.feature_sum, grad_denominator)
        if evaluator.train:
            per_monomial = dot_rows(grad_phi, chunk.at_query.phi)
            small.weight.add_(sum_over_heads(inputs.weight, per_monomial))
        grad_x = evaluator.backward(chunk.at_query, weigh(grad_phi, inputs.weight))
        grad_x = grad_x + grad_mean_logit * found.key_mean

        small.coefficients.add_(more)
        small.query_scale.add_(sum_of_products(grad_x, parts.query.to(grad_x.dtype)))
        grad_query[..., span, :] = _joined(grad_x * inputs.query_scale, span, len(inputs.query))
        to_mean = grad_mean_logit / chunk.seen.clamp(min=1)
        rows.append(_RowGradients(seen, floored, found.constant, grad_denominator, to_mean))
        seen = seen_after
    return grad_query, small, rows


def _key_pass(
    grad_out: Tensor, future: Sums, inputs: Inputs, rows: list[_RowGradients], evaluator: Evaluator
) -> tuple[Tensor, Tensor, Sums]:
    grad_key, grad_value = torch.empty_like(inputs.key), torch.empty_like(inputs.value)
    for span, row in reversed(list(zip(_spans(inputs.query), rows, strict=True))):
        parts, _ = _cut(inputs, span, row.seen)
        chunk = _chunk(parts, evaluator)
        grad = _chunks(grad_out, span).to(row.floored.dtype) / row.floored
        grad_scores = (grad @ chunk.value.mT + row.denominator).tril_()
        scores = (chunk.scores + row.constant).tril_()
        along_query = row.mean_logit * chunk.at_query.x
        own = Sums(
            _over_groups(sum_over_rows(chunk.phi_query, grad)),
            _over_groups(sum_over_rows(chunk.phi_query, row.denominator)),
            _over_groups(along_query.sum(-2, keepdim=True)),
            _over_groups(row.constant.mT @ grad),
        )
        after, future = _accumulate(future, own, from_the_end=True)

        grad_phi = tuple(_over_groups(part @ grad_scores) for part in chunk.phi_query)
        grad_phi = add(grad_phi, from_rows(inputs.blocks, after.feature_value, chunk.value))
        grad_phi = add_outer_(grad_phi, after.feature_sum, torch.ones_like(chunk.value[..., :1]))
        grad_x = evaluator.backward(chunk.at_key, grad_phi)
        not_before = _over_groups(along_query).flip(-2).cumsum(-2).flip(-2)
        grad_x = grad_x + not_before + after.key_sum
        grad_v = _over_groups(scores.mT @ grad) + after.value_sum
        grad_v = grad_v + apply_to_rows(chunk.at_key.phi, after.feature_value)
        batch = len(inputs.key)
        grad_key[..., span, :] = _joined(keep(parts.mask, _ALL, grad_x * inputs.key_scale), span, batch)
        grad_value[..., span, :] = _joined(keep(parts.mask, _ALL, grad_v), span, batch)
    return grad_key, grad_value, future


def _spans(x: Tensor) -> Iterator[slice]:
    """Whole chunks, as many as fit the cache at once; what is left at the end by itself."""
    length, whole = x.shape[-2], x.shape[-2] // _CHUNK * _CHUNK
    step = max(1, rows_at_once(x) // _FORMED // _CHUNK) * _CHUNK
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole))
    if whole < length or not length:
        yield slice(whole, length)


def _is_one_chunk(span: slice) -> bool:
    return bool(span.stop - span.start <= _CHUNK)


def _chunks(x: Tensor, span: slice) -> Tensor:
    """Those of a span as rows of the batch: ``(B, H, G, n, c) -> (B·K, H, G, C, c)``."""
    x = x[..., span, :]
    return x if _is_one_chunk(span) else x.unflatten(-2, (-1, _CHUNK)).movedim(-3, 1).flatten(0, 1)


def _joined(x: Tensor, span: slice, batch: int) -> Tensor:
    """The way back: ``(B·K, H, G, C, c) -> (B, H, G, K·C, c)``."""
    if _is_one_chunk(span):
        return x
    number = (span.stop - span.start) // _CHUNK
    return x.unflatten(0, (batch, number)).movedim(1, -3).flatten(-3, -2)


def _over_groups(x: Tensor) -> Tensor:
    return x.sum(2, keepdim=True)


def _cut(inputs: Inputs, span: slice, seen: Tensor) -> tuple[Inputs, Tensor]:
    """The chunks of a span, as inputs; how many keys came before the next span."""
    query, key, value = (_chunks(x, span) for x in (inputs.query, inputs.key, inputs.value))
    mask = None if inputs.mask is None else _chunks(inputs.mask, span)
    before, seen = _running(seen, key_count(key, mask))
    return inputs._replace(query=query, key=key, value=value, mask=mask, seen=before), seen


def _accumulate(first: Sums, own: Sums, *, from_the_end: bool = False) -> tuple[Sums, Sums]:
    """The sums that each chunk finds, given its own, and those after the last one."""
    pairs = (_running(a, b, from_the_end) for a, b in zip(first, own, strict=True))
    found, after = zip(*pairs, strict=True)
    return Sums(*found), Sums(*after)


def _running(first: Tensor, own: Tensor, from_the_end: bool = False) -> tuple[Tensor, Tensor]:
    """``(B, ...), (B·K, ...)``: the first and all of own before each, ``(B·K, ...)``, and the total."""
    if len(own) == len(first):
        return first, first + own
    own = own.unflatten(0, (len(first), -1))
    own = own.flip(1) if from_the_end else own
    sums = torch.cat([first[:, None], own], dim=1).cumsum(1)
    before, total = sums[:, :-1], sums[:, -1]
    return (before.flip(1) if from_the_end else before).flatten(0, 1), total


def _chunk(parts: Inputs, evaluator: Evaluator) -> Chunk:
    dtype, mask = parts.weight.dtype, parts.mask
    query = parts.query * parts.query_scale
    key = keep(mask, _ALL, parts.key.to(dtype) * parts.key_scale)
    value = keep(mask, _ALL, parts.value.to(dtype))
    at_query, at_key = evaluator.evaluate(query), evaluator.evaluate(key)
    phi_query = weigh(at_query.phi, parts.weight)
    scores = inner(phi_query, at_key.phi).tril()
    own = torch.ones_like(key[:1, :1, :, :, :1], dtype=torch.int64) if mask is None else mask
    return Chunk(value, at_query, at_key, phi_query, scores, parts.seen + own.cumsum(-2))


def _look_back(chunk: Chunk, sums: Sums, coefficients: Tensor) -> Rows:
    divisor = chunk.seen.clamp(min=1)
    key_mean = (sums.key_sum + chunk.at_key.x.cumsum(-2)) / divisor
    value_mean = (sums.value_sum + chunk.value.cumsum(-2)) / divisor
    numerator = chunk.scores @ chunk.value + apply_to_rows(chunk.phi_query, sums.feature_value)
    denominator = chunk.scores.sum(-1, keepdim=True) + apply_to_rows(chunk.phi_query, sums.feature_sum)
    mean_logit = (chunk.at_query.x * key_mean).sum(-1, keepdim=True)
    guarded = guard(denominator, mean_logit, chunk.seen, coefficients)
    constant = torch.where(chunk.seen > 0, guarded.floored - denominator, 0.0) / divisor
    return Rows(numerator, denominator, key_mean, value_mean, mean_logit, guarded, constant)


def _output(found: Rows) -> Tensor:
    """The mean value and how the row differs from it, which with a single key is 0, whatever the floor.

    Not `torch.addcmul`, whose product is not rounded as that in the numerator was.
    """
    beside = found.numerator - found.denominator * found.value_mean
    return torch.addcdiv(found.value_mean, beside, found.guarded.floored)


def _own_sums(chunk: Chunk) -> Sums:
    return Sums(
        sum_over_rows(chunk.at_key.phi, chunk.value),
        total_over_rows(chunk.at_key.phi),
        chunk.at_key.x.sum(-2, keepdim=True),
        chunk.value.sum(-2, keepdim=True),
    )
