"""What a call of fused attention is: its shapes, and its tensors as the kernels take them."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.ops.triton.layout import padded
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.tiles import WIDE_TILES, Tiles, tiles_for


class Unit(NamedTuple):
    """What becomes of the rows of queries and keys as they are loaded: see `unit_rows`; code 0 is nothing."""

    code: int = 0
    eps: float = 0.0


class Shape(NamedTuple):
    """What a call's tensors have in common."""

    batch: int
    heads: int  # of keys
    groups: int  # of query heads to a key head
    dim: int
    value_dim: int
    block_d: int
    block_v: int
    dtype: torch.dtype

    @classmethod
    def of(cls, query: Tensor, value: Tensor) -> "Shape":
        batch, heads, groups, _, dim = query.shape
        value_dim = value.shape[-1]
        return cls(batch, heads, groups, dim, value_dim, padded(dim), padded(value_dim), query.dtype)

    def tiles(self, plan: Plan) -> Tiles:
        if plan.is_wide:
            return WIDE_TILES
        return tiles_for(self.dtype, self.block_d, self.block_v, plan.quadratic, plan.tiles.device)

    def constants(self, plan: Plan, tiles: Tiles) -> dict[str, Any]:
        return {
            "MAPS": plan.tiles.shape[0],
            "IDENTITY": int(plan.identity),
            "QUADRATIC": plan.quadratic,
            "DIM": self.dim,
            "DV": self.value_dim,
            "BLOCK_D": self.block_d,
            "BLOCK_V": self.block_v,
            "GROUP": plan.group,
            "PRECISION": _precision(self.dtype),
            **tiles.compilation,
        }


def _precision(dtype: torch.dtype) -> str:
    """Products of float32 are as exact as torch's own are set to be."""
    exact = dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if exact else "tf32"


def cdiv(whole: int, part: int) -> int:
    """How many parts a whole has, the last of which may be short; Triton's own takes microseconds."""
    return -(-whole // part)


def summary_shapes(shape: Shape, plan: Plan) -> list[tuple[int, ...]]:
    """Of sums, totals, key mean and value mean of one key head."""
    features = plan.num_features
    return [(features, shape.block_v), (features,), (shape.block_d,), (shape.block_v,)]


def map_arguments(plan: Plan) -> tuple[Any, ...]:
    return *plan.tensors, plan.tiles.shape[1], plan.num_groups


def per_map(coefficients: Tensor, plan: Plan) -> Tensor:
    return coefficients.expand(plan.tiles.shape[0], -1).contiguous()


def as_rows(x: Tensor) -> Tensor:
    """``(B, H, G, n, c) -> (B, H·G, n, c)`` with unit column stride."""
    x = x.flatten(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def over_groups(grad: Tensor, like: Tensor) -> Tensor:
    """The way back, of the gradient of `like`: ``(B, H·G, n, c) -> (B, H, 1, n, c)``."""
    batch, heads = like.shape[:2]
    if grad.shape[1] == heads:
        return grad.view(like.shape)
    groups = grad.shape[1] // heads
    return grad.view(batch, heads, groups, *like.shape[3:]).sum(2, keepdim=True).to(like.dtype)


def flat(mask: Tensor | None, instead: Tensor) -> Tensor:
    """The mask as bytes ``(B, n)``; a kernel that has none gets some pointer it never reads."""
    return instead if mask is None else mask.flatten(1).contiguous().view(torch.uint8)


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    """The same, or None."""
    return None if mask is None else flat(mask, mask)


def keys_seen(mask: Tensor | None, queries: int) -> Tensor | None:
    """How many keys each position sees, ``(B, N)``; without a mask the kernels know.

    It is an input of the operators: a compiler forms it once for all layers and their backward passes.
    """
    if mask is None:
        return None
    keys = mask.flatten(1)
    return F.pad(keys, (max(0, queries - keys.shape[1]), 0)).cumsum(1, dtype=torch.int32)


def earlier(count: Tensor | None, instead: Tensor) -> Tensor:
    """How many keys each state has seen, ``(B,)``; without states some pointer that no kernel reads."""
    return instead if count is None else count.flatten().contiguous()
