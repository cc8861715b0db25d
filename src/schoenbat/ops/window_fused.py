"""Exact near, linear far by the fused kernels: which calls they run, and how such a call is made."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops import fused
from schoenbat.ops.blocks import FeatureMap
from schoenbat.ops.near_and_far import Window, map_rows
from schoenbat.ops.no_queries import of_no_query
from schoenbat.ops.sums import Before, Sums
from schoenbat.ops.unit_rows import UnitRows

WIDEST = 128


def obstacle(
    query: Tensor, value: Tensor, feature_map: FeatureMap, implementation: str, others: Iterable[Tensor]
) -> str | None:
    """Why the fused kernels cannot run a call; None if they can. `others`: as in `step_obstacle`."""
    found = fused.obstacle(query) or fused.memory_obstacle(query, value)
    found = found or fused.training_obstacle(feature_map) or _width_obstacle(query)
    # A short sequence that is padded to a long one overflows float16 in the backward pass.
    is_careful = implementation == "auto" and query.dtype == torch.float16
    if is_careful and fused.wants_gradients(query, value, *others):
        found = found or "in float16 gradients are taken by name alone"
    return found


def _width_obstacle(query: Tensor) -> str | None:
    if query.shape[-1] > WIDEST:
        return f"with a window heads are at most {WIDEST} wide, got {query.shape[-1]}"
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    feature_map: FeatureMap,
    query_scale: Tensor,
    window: Window,
) -> Tensor:
    """As `window.attend`, of a whole sequence."""
    from schoenbat.ops.triton import library_window

    if not query.shape[-2]:
        return of_no_query(query, key, value)
    far: list[Tensor] = []
    if window.query_map is not None:
        # A masked key, which may be NaN, must not reach the gradient of its map.
        far = list(window.far_rows(query, key if mask is None else torch.where(mask, key, 0.0)))
    plan, _, flags = fused.lay_out(query, feature_map, query.dtype)
    small = plan, feature_map.coefficients, query_scale, window.log_weight, flags, feature_map.key_scale
    ends = window.width, window.is_causal
    parts = [
        library_window.attend(query, key, part, far, mask, *small, *ends)[0] for part in fused.columns(value)
    ]
    return fused.side_by_side(parts)


class Remembered(NamedTuple):
    """What a token finds: the last keys, and the sums of all before them."""

    key: Tensor  # (B, H, width, d)
    value: Tensor  # (B, H, width, d_v)
    mask: Tensor  # bool (B, width)
    far: Before


def step_obstacle(
    query: Tensor, value: Tensor, before: Remembered, feature_map: FeatureMap, others: Iterable[Tensor]
) -> str | None:
    """Why the fused kernel cannot decode; None if it can. `others`: more that gradients may be wanted for."""
    found = fused.obstacle(query) or fused.state_obstacle(before.far.sums, feature_map)
    found = found or _width_obstacle(query)
    if query.shape[-2] != 1:
        found = found or "with a state and a window it takes one token at a time"
    if not fused.is_decoding(query, value, before.key, before.value, *before.far.sums, *others):
        found = found or "with a state and a window it gives no gradients"
    return found


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    before: Remembered,
    feature_map: FeatureMap,
    scale: Tensor,  # (H, G, 1, 1), of the logits
    far_weight: Tensor,  # (H, G, 1, 1)
    far_maps: tuple[Tensor, Tensor] | None,  # (H, G, d, d) and (H, 1, d, d)
    unit_rows: UnitRows | None,
) -> tuple[Tensor, Remembered]:
    """One token by one kernel: its output, and what the next one finds."""
    from schoenbat.ops.triton import library_window

    *near, (sums, count) = before
    if unit_rows is not None and (far_maps is not None or not before.key.shape[-2]):
        # The key that is mapped, or leaves at once, is the normalised one.
        query, key, unit_rows = unit_rows(query), unit_rows(key), None
    far: list[Tensor] = []
    if far_maps is not None:
        leaving = before.key[:, :, None, :1].to(key.dtype) if before.key.shape[-2] else key
        far = list(map_rows(query, leaving, *far_maps))
    plan, _, flags = fused.lay_out(query, feature_map, torch.float32)
    small = plan, feature_map.coefficients, scale, far_weight, flags, feature_map.key_scale
    out, new_key, new_value, new_mask, *after, seen = library_window.step(
        query, key, value, mask, far, near, count, list(sums), *small, *fused.as_unit(unit_rows)
    )
    return out, Remembered(new_key, new_value, new_mask, Before(Sums(*after), seen))
