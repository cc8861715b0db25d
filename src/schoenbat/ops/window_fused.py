"""Exact near, linear far by the fused kernels: which calls they run, and how such a call is made."""

import torch
from torch import Tensor

from schoenbat.ops import fused
from schoenbat.ops.blocks import FeatureMap
from schoenbat.ops.reference import of_no_query
from schoenbat.ops.window import Window

WIDEST = 128


def obstacle(query: Tensor, value: Tensor, feature_map: FeatureMap, implementation: str) -> str | None:
    """Why the fused kernels cannot run a call; None if they can."""
    found = fused.obstacle(query, value[..., : fused.WIDEST_VALUE]) or fused.training_obstacle(feature_map)
    if query.shape[-1] > WIDEST:
        found = found or f"with a window heads are at most {WIDEST} wide, got {query.shape[-1]}"
    # A short sequence that is padded to a long one overflows float16 in the backward pass.
    if query.dtype == torch.float16 and implementation == "auto":
        found = found or "in float16 it is taken by name alone"
    return found


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
    return fused.in_parts(
        value, lambda part: library_window.attend(query, key, part, far, mask, *small, *ends)[0]
    )
