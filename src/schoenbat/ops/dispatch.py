"""Which implementation runs a call, and how a call is put together from the operators.

Shapes are those of `eager`: query ``(B, H, G, n_q, d)``, key and value ``(B, H, 1, n_k, ·)``, mask None or
bool ``(B, 1, 1, n_k, 1)``, count int64 ``(B, 1, 1, 1, 1)``, query_scale ``(H, G, 1, 1)``.
"""

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from schoenbat.ops import eager, eager_causal, fused, library, reference
from schoenbat.ops.blocks import FeatureMap
from schoenbat.ops.eager import Summary
from schoenbat.ops.eager_causal import Inputs
from schoenbat.ops.no_queries import of_no_query
from schoenbat.ops.operators import as_operators
from schoenbat.ops.sums import Before, Sums, key_count, nothing_before
from schoenbat.ops.unit_rows import UnitRows

Implementation = Literal["auto", "reference", "eager", "triton"]


def choose(implementation: str, obstacle: str | None, query: Tensor) -> str:
    """``"reference"``, ``"eager"`` or ``"triton"``; what was asked for by name is never replaced by another.

    `obstacle` says what keeps the fused kernels from running this call, if anything does.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(repr(name) for name in get_args(Implementation))
        raise ValueError(f"unknown implementation {implementation!r}; known: {known}")
    if implementation == "triton" and obstacle is not None:
        raise NotImplementedError(
            f"implementation='triton' cannot run this call: {obstacle}; use 'auto' or 'eager', which can"
        )
    if implementation != "auto":
        return implementation
    if query.is_cuda and obstacle is not None:
        _tell_once(obstacle)
    return "triton" if query.is_cuda and obstacle is None else "eager"


def _tell_once(obstacle: str) -> None:
    """On a GPU the eager path takes many times as long as the kernels: nobody shall have to find that out."""
    # Not transforms, which are known to run plain PyTorch; nor while a compiler looks on, nor in each call.
    if torch.compiler.is_compiling() or not as_operators() or obstacle in _TOLD:
        return
    _TOLD.add(obstacle)
    warnings.warn(
        f"attention runs in plain PyTorch on this GPU, not in the fused kernels: {obstacle}",
        stacklevel=2,
    )


_TOLD: set[str] = set()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    *,
    is_causal: bool,
    implementation: str,
    unit_rows: UnitRows | None = None,
    before: Before | None = None,
) -> Tensor:
    """Attention over the whole sequence; causal with n_q ≠ n_k aligns the last query with the last key.

    With `unit_rows`, queries and keys are normalised first; fused kernels do it on the way. A causal call may
    go on from what was `before`.
    """
    obstacle = fused.obstacle(query) or fused.memory_obstacle(query, value)
    if before is None:
        obstacle = obstacle or fused.map_obstacle(query, feature_map, implementation)
        chosen = choose(implementation, obstacle, query)
    else:
        obstacle = obstacle or fused.state_obstacle(before.sums, feature_map)
        chosen = choose_with_sums(implementation, obstacle, query)
    if not query.shape[-2] and before is None:
        return of_no_query(query, key, value)
    if chosen == "triton":
        inputs = query, key, value, mask, feature_map, query_scale, unit_rows
        return fused.attend_causal(*inputs, before) if is_causal else fused.attend(*inputs)
    if unit_rows is not None:
        query, key = unit_rows(query), unit_rows.of_keys(key, mask)
    if chosen == "reference":
        visible = _visible(query, key, mask, is_causal)
        q, k, v = (x.to(feature_map.weight.dtype) for x in (query, key, value))
        out = reference.attend(q, k, v, visible, *feature_map[:3], query_scale, feature_map.key_scale)
        return out.to(query.dtype)
    if is_causal:
        return _attend_causal(query, key, value, mask, feature_map, query_scale, before)
    summary = _summarize(key, value, mask, feature_map)
    return _read(query, summary, key_count(key, mask), feature_map, query_scale)


def accumulate(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    *,
    implementation: str,
) -> tuple[Sums, Tensor]:
    """Keys and values as plain sums, which add up over pieces of a sequence, and their count."""
    obstacle = fused.obstacle(key) or fused.memory_obstacle(key, value)
    obstacle = obstacle or fused.training_obstacle(feature_map)
    chosen = choose_with_sums(implementation, obstacle, key)
    count = key_count(key, mask)
    if chosen == "triton":
        return fused.accumulate(key, value, mask, feature_map, None), count
    summary = _summarize(key, value, mask, feature_map)
    sums = Sums(
        summary.feature_value + summary.feature_sum @ summary.value_mean,
        summary.feature_sum,
        summary.key_mean * count,
        summary.value_mean * count,
    )
    return sums, count


def read(
    query: Tensor,
    before: Before,
    feature_map: FeatureMap,
    query_scale: Tensor,
    *,
    implementation: str,
) -> Tensor:
    """Bidirectional attention to everything in the sums."""
    sums, count = before
    obstacle = fused.obstacle(query) or fused.memory_obstacle(query, sums.value_sum)
    obstacle = obstacle or fused.state_obstacle(sums, feature_map)
    if choose_with_sums(implementation, obstacle, query) == "triton":
        return fused.read(query, before, feature_map, query_scale)
    divisor = count.clamp(min=1)
    value_mean = sums.value_sum / divisor
    summary = Summary(
        sums.feature_value - sums.feature_sum @ value_mean,
        sums.feature_sum,
        sums.key_sum / divisor,
        value_mean,
    )
    return _read(query, summary, count, feature_map, query_scale)


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    before: Before,
    feature_map: FeatureMap,
    query_scale: Tensor,
    *,
    implementation: str,
    unit_rows: UnitRows | None = None,
) -> tuple[Tensor, Sums]:
    """Causal attention of n new tokens to those before them and to one another; the sums after them.

    `unit_rows` as in `attend`.
    """
    sums, count = before
    obstacle = fused.obstacle(query) or fused.state_obstacle(sums, feature_map)
    if not fused.is_decoding(query, key, value, *sums, query_scale):
        obstacle = obstacle or fused.memory_obstacle(query, value)
    chosen = choose(implementation, obstacle, query)
    if chosen == "triton":
        return fused.step(query, key, value, mask, before, feature_map, query_scale, unit_rows)
    if unit_rows is not None:
        query, key = unit_rows(query), unit_rows.of_keys(key, mask)
    shared = mask, count, *feature_map[:3], query_scale, feature_map.key_scale
    if chosen == "reference":
        q, k, v = (x.to(feature_map.weight.dtype) for x in (query, key, value))
        out, after = reference.step(q, k, v, *shared, sums)
        return out.to(query.dtype), Sums(*after)
    return _scan(Inputs(query, key, value, *shared), sums)


def choose_with_sums(implementation: str, obstacle: str | None, query: Tensor) -> str:
    chosen = choose(implementation, obstacle, query)
    if chosen == "reference":
        raise NotImplementedError(
            "implementation='reference' looks at all pairs of a sequence, which sums do not hold; use "
            "'auto', 'eager' or 'triton'"
        )
    return chosen


def _attend_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    before: Before | None,
) -> Tensor:
    """The keys before the first query become sums; queries before the first key see nothing."""
    queries, keys = query.shape[-2], key.shape[-2]
    # Not max(0, ...): a graph of torch.compile is for one of the cases, where lengths are plain differences.
    earlier = keys - queries if keys > queries else 0
    blind = queries - keys if queries > keys else 0
    if before is not None:
        sums, count = before
    elif earlier:
        rows = (
            key[..., :earlier, :],
            value[..., :earlier, :],
            None if mask is None else mask[..., :earlier, :],
        )
        sums, count = accumulate(*rows, feature_map, implementation="eager")
    else:
        sums, count = nothing_before(key, value, feature_map)
    out, _ = _scan(
        Inputs(
            query[..., blind:, :],
            key[..., earlier:, :],
            value[..., earlier:, :],
            None if mask is None else mask[..., earlier:, :],
            count,
            *feature_map[:3],
            query_scale,
            feature_map.key_scale,
        ),
        sums,
    )
    if not blind:
        return out
    return torch.cat([out.new_zeros(*out.shape[:-2], blind, out.shape[-1]), out], dim=-2)


def _visible(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    lengths = query.shape[-2], key.shape[-2]
    visible = torch.ones(lengths, dtype=torch.bool, device=key.device)
    if is_causal:
        visible = visible.tril(lengths[1] - lengths[0])
    return visible[None, None, None] if mask is None else visible & mask.mT


def _summarize(key: Tensor, value: Tensor, mask: Tensor | None, feature_map: FeatureMap) -> Summary:
    blocks, scale = feature_map.blocks, feature_map.key_scale
    if not as_operators():
        return eager.summarize(key, value, mask, blocks, scale)
    return Summary(*library.summarize(key, value, mask, blocks.maps, blocks.layout, scale))


def _read(
    query: Tensor, summary: Summary, count: Tensor, feature_map: FeatureMap, query_scale: Tensor
) -> Tensor:
    blocks, coefficients = feature_map.blocks, feature_map.coefficients
    weight = feature_map.weight[:, None, :, None]
    weighted = Summary(weight * summary.feature_value, weight * summary.feature_sum, *summary[2:])
    count = count.to(summary.value_mean.dtype)
    if not as_operators():
        chunks = eager.read(query, weighted, count, blocks, coefficients, query_scale)
        rows = (torch.addcdiv(summary.value_mean, above, below) for _, above, below in chunks)
        return torch.cat([row.to(query.dtype) for row in rows], dim=-2)
    return library.read(query, list(weighted), count, blocks.maps, coefficients, query_scale, blocks.layout)


def _scan(inputs: Inputs, sums: Sums) -> tuple[Tensor, Sums]:
    if not as_operators():
        return eager_causal.scan(inputs, sums)
    query, key, value, mask, count, blocks, weight, coefficients, query_scale, key_scale = inputs
    out, *after = library.scan(
        query,
        key,
        value,
        mask,
        count,
        list(sums),
        blocks.maps,
        weight,
        coefficients,
        query_scale,
        blocks.layout,
        key_scale,
    )
    return out, Sums(*after)
