"""Calls of the fused kernels: which of them they can run, and how a call is put together.

Shapes are those of `dispatch`. Triton is imported where a kernel is called, and not before.
"""

import importlib.util
import os

import torch
from torch import Tensor

from schoenbat.ops.blocks import FeatureMap
from schoenbat.ops.operators import as_operators
from schoenbat.ops.sums import Before, Sums
from schoenbat.ops.unit_rows import UnitRows

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs kernels on the CPU, slowly: for tests.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDEST_HEAD, WIDEST_TRAINED = 256, 128
_WIDEST_VALUE = 128
# On GPUs with less shared memory than Hopper's: how wide rows may be whatever their dtype and their heads.
_WIDEST_OF_ALL, _NARROW_HEAD = 64, 32


def device_obstacle(query: Tensor) -> str | None:
    """Why no kernel can run on a tensor; None if some can."""
    if not (_HAS_TRITON and (query.is_cuda or _INTERPRETED)):
        return f"it needs the package triton and a CUDA device, the query is on {query.device}"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it knows float16, bfloat16 and float32, the query is {query.dtype}"
    return None


def obstacle(query: Tensor) -> str | None:
    """Why the fused kernels cannot run a call; None if they can."""
    if (problem := device_obstacle(query)) is not None:
        return problem
    from schoenbat.ops.triton import shared_memory

    if not shared_memory.is_enough(query.device):
        least = shared_memory.LEAST_MEMORY // 1024
        return f"it needs {least} KiB of shared memory for a program, which this GPU has not"
    if query.shape[-1] > WIDEST_HEAD:
        return f"heads are at most {WIDEST_HEAD} wide, got {query.shape[-1]}"
    if not query.shape[0] * query.shape[1]:
        return "there is nothing in the batch"
    if not as_operators():
        return "it has no derivative under torch.func transforms"
    return None


def memory_obstacle(*rows: Tensor) -> str | None:
    """What keeps whole sequences of rows from GPUs that have less shared memory than Hopper's."""
    from schoenbat.ops.triton.shared_memory import is_roomy

    first = rows[0]
    if is_roomy(first.device) or all(x.shape[-1] <= _WIDEST_OF_ALL for x in rows):
        return None
    if first.dtype == torch.float32:
        return f"float32 rows wider than {_WIDEST_OF_ALL} do not fit the shared memory of this GPU"
    if first.shape[-1] <= _NARROW_HEAD:  # whose pairs are one wide group
        return (
            f"beside heads of at most {_NARROW_HEAD}, values wider than {_WIDEST_OF_ALL} do not fit the "
            "shared memory of this GPU"
        )
    return None


def state_obstacle(sums: Sums, feature_map: FeatureMap) -> str | None:
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


def map_obstacle(query: Tensor, feature_map: FeatureMap, implementation: str) -> str | None:
    """What keeps the fused kernels from training a map: "auto" takes what was run on a GPU."""
    if implementation == "auto" and _is_trained(feature_map) and query.shape[-1] > WIDEST_TRAINED:
        return f"maps of heads wider than {WIDEST_TRAINED} are trained by name alone, got {query.shape[-1]}"
    return None


def accumulate(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    unit_rows: UnitRows | None,
) -> Sums:
    from schoenbat.ops.triton import library

    plan, _, flags = lay_out(key, feature_map, key.dtype, value.shape[-1])
    small = plan, flags, feature_map.key_scale, *as_unit(unit_rows)
    parts = [Sums(*library.summarize(key, part, mask, *small)) for part in columns(value)]
    return parts[0]._replace(
        feature_value=side_by_side([part.feature_value for part in parts]),
        value_sum=side_by_side([part.value_sum for part in parts]),
    )


def read(query: Tensor, before: Before, feature_map: FeatureMap, query_scale: Tensor) -> Tensor:
    from schoenbat.ops.triton import library

    value_dim = before.sums.feature_value.shape[-1]
    plan, _, flags = lay_out(query, feature_map, query.dtype, value_dim)
    small = plan, feature_map.coefficients, query_scale, flags
    parts = _columns_of(before.sums)
    return side_by_side([library.read(query, list(part), before.seen, *small)[0] for part in parts])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    unit_rows: UnitRows | None,
) -> Tensor:
    from schoenbat.ops.triton import library

    plan, trained, flags = lay_out(query, feature_map, query.dtype, value.shape[-1])
    small = plan, trained, feature_map.coefficients, query_scale, flags, feature_map.key_scale
    unit = as_unit(unit_rows)
    parts = [library.attend(query, key, part, mask, *small, *unit)[0] for part in columns(value)]
    return side_by_side(parts)


def attend_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    unit_rows: UnitRows | None,
    before: Before | None,
) -> Tensor:
    from schoenbat.ops.triton import library
    from schoenbat.ops.triton.call import keys_seen

    plan, trained, flags = lay_out_causal(query, key, value, feature_map, before)
    small = plan, trained, feature_map.coefficients, query_scale, flags, feature_map.key_scale
    unit, seen = as_unit(unit_rows), keys_seen(mask, query.shape[-2])
    values, count = columns(value), None if before is None else before.seen
    sums = [()] * len(values) if before is None else _columns_of(before.sums)
    parts = [
        library.attend_causal(query, key, part, mask, seen, list(own), count, *small, *unit)[0]
        for part, own in zip(values, sums, strict=True)
    ]
    return side_by_side(parts)


def as_unit(unit_rows: UnitRows | None) -> tuple[int, float]:
    """As operators take it: see `call.Unit`."""
    return (0, 0.0) if unit_rows is None else (unit_rows.code, unit_rows.eps)


def columns(value: Tensor) -> tuple[Tensor, ...]:
    """Wide values in parts: each column is mixed for itself, whatever stands beside it."""
    # The gradient of a split is a copy, even of one into one.
    return value.split(_WIDEST_VALUE, dim=-1) if value.shape[-1] > _WIDEST_VALUE else (value,)


def side_by_side(parts: list[Tensor]) -> Tensor:
    """The way back from `columns`."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _columns_of(sums: Sums) -> list[Sums]:
    parts = zip(columns(sums.feature_value), columns(sums.value_sum), strict=True)
    return [sums._replace(feature_value=products, value_sum=values) for products, values in parts]


def lay_out(
    query: Tensor, feature_map: FeatureMap, dtype: torch.dtype, value_dim: int | None = None
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The map as the kernels take it, and what of it is trained; with `value_dim` for bidirectional ones."""
    from schoenbat.ops.triton import layout, plan, tiles

    both, block_d = (feature_map.blocks, feature_map.weight), layout.padded(query.shape[-1])
    trained = plan.trained_map(*both, block_d) if _is_trained(feature_map) else []
    wide = value_dim is not None and tiles.takes_wide_groups(query, dtype, layout.padded(value_dim))
    form = value_dim is not None, wide and not trained  # see `plan.narrowed`
    with torch.no_grad():  # gradients go to what is trained, not through the plan
        planned = plan.plan_for(*both, dtype, block_d, *form)
    return planned.tensors, trained, planned.flags


def lay_out_causal(
    query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap, before: Before | None
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The same in wide groups for calls that have causal kernels for them: without state or a trained map."""
    from schoenbat.ops.triton import hopper_calls, plan

    may_be_wide = before is None and not _is_trained(feature_map)
    if may_be_wide and hopper_calls.may_take_causal_degrees(query, key, value):
        with torch.no_grad():
            planned = plan.plan_for(feature_map.blocks, feature_map.weight, query.dtype, 64, wide=True)
        if hopper_calls.takes_causal_degrees(planned):
            return planned.tensors, [], planned.flags
    return lay_out(query, feature_map, query.dtype)


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    before: Before,
    feature_map: FeatureMap,
    query_scale: Tensor,
    unit_rows: UnitRows | None,
) -> tuple[Tensor, Sums]:
    """One token without gradients by one kernel; else a causal call, and the sums by a pass of their own."""
    from schoenbat.ops.triton import library

    sums, count = before
    if not is_decoding(query, key, value, *sums, query_scale):
        out = attend_causal(query, key, value, mask, feature_map, query_scale, unit_rows, before)
        more = accumulate(key, value, mask, feature_map, unit_rows)
        return out, Sums(*(old + new for old, new in zip(sums, more, strict=True)))
    plan, _, flags = lay_out(query, feature_map, torch.float32)
    small = plan, feature_map.coefficients, query_scale, flags, feature_map.key_scale, *as_unit(unit_rows)
    out, *after = library.step(query, key, value, mask, count, list(sums), *small)
    return out, Sums(*after)


def is_decoding(query: Tensor, *others: Tensor) -> bool:
    """One token, and no gradients wanted: what the decoding kernels do."""
    return query.shape[-2] == 1 and not wants_gradients(query, *others)


def wants_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
