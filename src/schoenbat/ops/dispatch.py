"""Which implementation runs a call, and how a call is put together from the operators.

Shapes are those of `eager`: query ``(B, H, G, n_q, d)``, key and value ``(B, H, 1, n_k, ·)``, mask None or
bool ``(B, 1, 1, n_k, 1)``, count int64 ``(B, 1, 1, 1, 1)``, query_scale ``(H, G, 1, 1)``.
"""

import importlib.util
import os
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from schoenbat.ops import eager, eager_causal, library, reference
from schoenbat.ops.blocks import FeatureMap
from schoenbat.ops.eager import Summary
from schoenbat.ops.eager_causal import Inputs, Sums
from schoenbat.ops.unit_rows import UnitRows

Implementation = Literal["auto", "reference", "eager", "triton"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs kernels on the CPU, slowly: for tests.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDEST_HEAD, WIDEST_TRAINED, WIDEST_VALUE = 256, 128, 128
"""In fused kernels; wider values are attended to in parts."""
# They are checked in Triton's interpreter; "auto" takes them once a GPU has run their tests.
_BY_NAME = "kernels that go on from sums, or train a map, are taken by name alone"


class Before(NamedTuple):
    """The keys and values that a call does not see itself; a causal one has as many queries as keys then."""

    sums: Sums
    seen: Tensor  # int64 (B, 1, 1, 1, 1): how many


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
    return "triton" if query.is_cuda and obstacle is None else "eager"


def fused_obstacle(query: Tensor, value: Tensor) -> str | None:
    """Why the fused kernels cannot run a call; None if they can."""
    if not (_HAS_TRITON and (query.is_cuda or _INTERPRETED)):
        return f"it needs the package triton and a CUDA device, the query is on {query.device}"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it knows float16, bfloat16 and float32, the query is {query.dtype}"
    if query.shape[-1] > WIDEST_HEAD:
        return f"heads are at most {WIDEST_HEAD} wide, got {query.shape[-1]}"
    if value.shape[-1] > WIDEST_VALUE:
        return f"values of a state are at most {WIDEST_VALUE} wide, got {value.shape[-1]}"
    if not query.shape[0] * query.shape[1]:
        return "there is nothing in the batch"
    if not _as_operators():
        return "it has no derivative under torch.func transforms"
    return None


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

    With `unit_rows`, queries and keys are normalised first, inside the kernels where they can do it. A causal
    call may go on from what was `before`.
    """
    if before is None:
        obstacle = fused_obstacle(query, value[..., :WIDEST_VALUE])
        if _is_trained(feature_map):
            obstacle = obstacle or _map_obstacle(query) or _unless_named(implementation)
        chosen = choose(implementation, obstacle, query)
    else:
        obstacle = fused_obstacle(query, value) or _state_obstacle(before.sums, feature_map)
        chosen = _choose_with_sums(implementation, obstacle, query)
    if not query.shape[-2] and before is None:
        return reference.of_no_query(query, key, value)
    if chosen == "triton" and not is_causal:
        return _attend_fused(query, key, value, mask, feature_map, query_scale, unit_rows)
    if unit_rows is not None:
        query, key = unit_rows(query), unit_rows(key)
    if chosen == "triton":
        return _attend_causal_fused(query, key, value, mask, feature_map, query_scale, before)
    if chosen == "reference":
        visible = _visible(query, key, mask, is_causal)
        q, k, v = (x.to(feature_map.weight.dtype) for x in (query, key, value))
        out = reference.attend(q, k, v, visible, *feature_map[:3], query_scale, feature_map.key_scale)
        return out.to(query.dtype)
    if is_causal:
        return _attend_causal(query, key, value, mask, feature_map, query_scale, before)
    summary = _summarize(key, value, mask, feature_map)
    return _read(query, summary, eager.key_count(key, mask), feature_map, query_scale)


def accumulate(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    *,
    implementation: str,
) -> tuple[Sums, Tensor]:
    """Keys and values as plain sums, which add up over pieces of a sequence, and their count."""
    obstacle = fused_obstacle(key, value) or training_obstacle(feature_map)
    chosen = _choose_with_sums(implementation, obstacle, key)
    count = eager.key_count(key, mask)
    if chosen == "triton":
        return _accumulate_fused(key, value, mask, feature_map), count
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
    obstacle = fused_obstacle(query, sums.value_sum) or _state_obstacle(sums, feature_map)
    if _choose_with_sums(implementation, obstacle, query) == "triton":
        return _read_fused(query, before, feature_map, query_scale)
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
) -> tuple[Tensor, Sums]:
    """Causal attention of n new tokens to those before them and to one another; the sums after them."""
    sums, count = before
    obstacle = fused_obstacle(query, value) or _state_obstacle(sums, feature_map)
    if not _is_decoding(query, key, value, *sums, query_scale):
        obstacle = obstacle or _unless_named(implementation)
    chosen = choose(implementation, obstacle, query)
    if chosen == "triton":
        return _step_fused(query, key, value, mask, before, feature_map, query_scale)
    shared = mask, count, *feature_map[:3], query_scale, feature_map.key_scale
    if chosen == "reference":
        q, k, v = (x.to(feature_map.weight.dtype) for x in (query, key, value))
        out, after = reference.step(q, k, v, *shared, sums)
        return out.to(query.dtype), Sums(*after)
    return _scan(Inputs(query, key, value, *shared), sums)


def _is_decoding(query: Tensor, *others: Tensor) -> bool:
    """One token, and no gradients wanted: what the decoding kernel does."""
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (query, *others))
    return query.shape[-2] == 1 and not wanted


def _unless_named(implementation: str) -> str | None:
    return _BY_NAME if implementation == "auto" else None


def _choose_with_sums(implementation: str, obstacle: str | None, query: Tensor) -> str:
    chosen = choose(implementation, obstacle or _unless_named(implementation), query)
    if chosen == "reference":
        raise NotImplementedError(
            "implementation='reference' looks at all pairs of a sequence, which sums do not hold; use "
            "'auto', 'eager' or 'triton'"
        )
    return chosen


def _state_obstacle(sums: Sums, feature_map: FeatureMap) -> str | None:
    """What a state may have that the fused kernels do not know."""
    if sums.feature_value.dtype != torch.float32:
        return f"it goes on from a float32 state, got {sums.feature_value.dtype}"
    return training_obstacle(feature_map)


def training_obstacle(feature_map: FeatureMap) -> str | None:
    """What keeps kernels that do not train a map from running a call."""
    if _is_trained(feature_map):
        return "with sums or a window it gives no gradients to a trainable map yet"
    return None


def _is_trained(feature_map: FeatureMap) -> bool:
    """Whether gradients are wanted for the map itself."""
    tensors = *feature_map.blocks.maps, feature_map.weight, feature_map.coefficients
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _map_obstacle(query: Tensor) -> str | None:
    """What keeps the fused kernels from training a map: see `plan.make_plan`."""
    if query.shape[-1] > WIDEST_TRAINED:
        return f"it trains maps of heads at most {WIDEST_TRAINED} wide, got {query.shape[-1]}"
    return None


def _accumulate_fused(key: Tensor, value: Tensor, mask: Tensor | None, feature_map: FeatureMap) -> Sums:
    from schoenbat.ops.triton import library as fused

    plan, _, flags = lay_out(key, feature_map, key.dtype, wide=True)
    return Sums(*fused.summarize(key, value, mask, plan, flags, feature_map.key_scale))


def _read_fused(query: Tensor, before: Before, feature_map: FeatureMap, query_scale: Tensor) -> Tensor:
    from schoenbat.ops.triton import library as fused

    plan, _, flags = lay_out(query, feature_map, query.dtype, wide=True)
    small = plan, feature_map.coefficients, query_scale, flags
    return fused.read(query, list(before.sums), before.seen, *small)[0]


def _attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    unit_rows: UnitRows | None,
) -> Tensor:
    from schoenbat.ops.triton import library as fused

    unit, eps = (0, 0.0) if unit_rows is None else (unit_rows.code, unit_rows.eps)
    plan, trained, flags = lay_out(query, feature_map, query.dtype, wide=True)
    small = plan, trained, feature_map.coefficients, query_scale, flags, feature_map.key_scale, unit, eps
    # Each column of the values is mixed for itself, whatever stands beside it.
    parts = [fused.attend(query, key, part, mask, *small)[0] for part in value.split(WIDEST_VALUE, dim=-1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _attend_causal_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    before: Before | None,
) -> Tensor:
    from schoenbat.ops.triton import library as fused

    plan, trained, flags = lay_out(query, feature_map, query.dtype)
    small = plan, trained, feature_map.coefficients, query_scale, flags, feature_map.key_scale
    sums, count = ([], None) if before is None else (list(before.sums), before.seen)
    parts = [
        fused.attend_causal(query, key, part, mask, sums, count, *small)[0]
        for part in value.split(WIDEST_VALUE, dim=-1)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def lay_out(
    query: Tensor, feature_map: FeatureMap, dtype: torch.dtype, *, wide: bool = False
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The map as the kernels take it, and what of it is trained."""
    from schoenbat.ops.triton import launch, plan

    both, block_d = (feature_map.blocks, feature_map.weight), launch.padded(query.shape[-1])
    trained = plan.trained_map(*both) if _is_trained(feature_map) else []
    with torch.no_grad():  # gradients go to what is trained, not through the plan
        planned = plan.plan_for(*both, dtype, block_d, wide)
    return planned.tensors, trained, planned.flags


def _step_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    before: Before,
    feature_map: FeatureMap,
    query_scale: Tensor,
) -> tuple[Tensor, Sums]:
    """One token without gradients by one kernel; else a causal call, and the sums by a pass of their own."""
    from schoenbat.ops.triton import library as fused

    sums, count = before
    if not _is_decoding(query, key, value, *sums, query_scale):
        out = _attend_causal_fused(query, key, value, mask, feature_map, query_scale, before)
        more = _accumulate_fused(key, value, mask, feature_map)
        return out, Sums(*(old + new for old, new in zip(sums, more, strict=True)))
    plan, _, flags = lay_out(query, feature_map, torch.float32)
    small = plan, feature_map.coefficients, query_scale, flags, feature_map.key_scale
    out, *after = fused.step(query, key, value, mask, count, list(sums), *small)
    return out, Sums(*after)


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
    earlier = max(0, key.shape[-2] - query.shape[-2])
    blind = max(0, query.shape[-2] - key.shape[-2])
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
        sums, count = _nothing(key, value, feature_map)
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


def _nothing(key: Tensor, value: Tensor, feature_map: FeatureMap) -> tuple[Sums, Tensor]:
    """The sums of no keys. (Summing up no rows gives the same, but ONNX cannot do it.)"""
    lead, features = (*key.shape[:2], 1), feature_map.weight.shape[-1]
    shapes = (features, value.shape[-1]), (features, 1), (1, key.shape[-1]), (1, value.shape[-1])
    sums = Sums(*(feature_map.weight.new_zeros(*lead, *shape) for shape in shapes))
    return sums, torch.zeros(key.shape[0], 1, 1, 1, 1, dtype=torch.int64, device=key.device)


def _visible(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    lengths = query.shape[-2], key.shape[-2]
    visible = torch.ones(lengths, dtype=torch.bool, device=key.device)
    if is_causal:
        visible = visible.tril(lengths[1] - lengths[0])
    return visible[None, None, None] if mask is None else visible & mask.mT


def _as_operators() -> bool:
    """Not under transforms: an operator has no forward-mode derivative and would give silent zeros.

    Nor for ONNX, which knows PyTorch's own operators only.
    """
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (transformed or torch.onnx.is_in_onnx_export())


def _summarize(key: Tensor, value: Tensor, mask: Tensor | None, feature_map: FeatureMap) -> Summary:
    blocks, scale = feature_map.blocks, feature_map.key_scale
    if not _as_operators():
        return eager.summarize(key, value, mask, blocks, scale)
    return Summary(*library.summarize(key, value, mask, blocks.maps, blocks.layout, scale))


def _read(
    query: Tensor, summary: Summary, count: Tensor, feature_map: FeatureMap, query_scale: Tensor
) -> Tensor:
    blocks, coefficients = feature_map.blocks, feature_map.coefficients
    weight = feature_map.weight[:, None, :, None]
    weighted = Summary(weight * summary.feature_value, weight * summary.feature_sum, *summary[2:])
    count = count.to(summary.value_mean.dtype)
    if not _as_operators():
        chunks = eager.read(query, weighted, count, blocks, coefficients, query_scale)
        rows = (torch.addcdiv(summary.value_mean, above, below) for _, above, below in chunks)
        return torch.cat([row.to(query.dtype) for row in rows], dim=-2)
    return library.read(query, list(weighted), count, blocks.maps, coefficients, query_scale, blocks.layout)


def _scan(inputs: Inputs, sums: Sums) -> tuple[Tensor, Sums]:
    if not _as_operators():
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
