"""What attention adds up over keys and values.

Shapes are those of `eager`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.blocks import FeatureMap


class Sums(NamedTuple):
    """What the keys and values seen so far leave behind; features without weights, keys scaled."""

    feature_value: Tensor  # (B, H, 1, F, d_v): Σ φ(k) vᵀ
    feature_sum: Tensor  # (B, H, 1, F, 1)
    key_sum: Tensor  # (B, H, 1, 1, d)
    value_sum: Tensor  # (B, H, 1, 1, d_v)


class Before(NamedTuple):
    """The keys and values that a call does not see itself; a causal one has as many queries as keys then."""

    sums: Sums
    seen: Tensor  # int64 (B, 1, 1, 1, 1): how many


def nothing_before(key: Tensor, value: Tensor, feature_map: FeatureMap) -> Before:
    """No keys at all. (Summing up no rows gives the same, but ONNX cannot do it.)"""
    lead, features = (*key.shape[:2], 1), feature_map.weight.shape[-1]
    shapes = (features, value.shape[-1]), (features, 1), (1, key.shape[-1]), (1, value.shape[-1])
    sums = Sums(*(feature_map.weight.new_zeros(*lead, *shape) for shape in shapes))
    return Before(sums, torch.zeros(key.shape[0], 1, 1, 1, 1, dtype=torch.int64, device=key.device))


def key_count(key: Tensor, mask: Tensor | None) -> Tensor:
    """How many keys take part: int64 ``(B, 1, 1, 1, 1)``."""
    if mask is not None:
        return mask.sum(-2, keepdim=True)
    return torch.full((key.shape[0], 1, 1, 1, 1), key.shape[-2], device=key.device)
