"""Which calls the kernels for Hopper's warp groups take, and what they have in common: see `hopper`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops.triton.call import Shape, Unit
from schoenbat.ops.triton.plan import Plan

# Copies of 16 bytes want rows that begin at multiples of it; Triton knows of multiples of 16 numbers alone.
_ALIGNED = 16
# Tiles of directions that shared memory has room for beside rows and sums; 16 levels at most in one group.
MOST_TILES = 17


def takes_pairs(shape: Shape, plan: Plan, rows: Sequence[Tensor]) -> bool:
    """Whether a map has identity features, and about as many pairs as channels, as causal kernels want it.

    They go through all positions, whether there are queries, or keys, or both: rows are query, key and value.
    """
    num_pairs = plan.root_weight.shape[-1]
    fits = plan.identity and plan.quadratic == 1 and plan.group == 64 and num_pairs == shape.block_d
    queries, keys = rows[0].shape[-2], rows[1].shape[-2]
    return fits and max(queries, keys) <= 2 * min(queries, keys) and _takes(shape, rows, (64, 128))


def takes_degrees(shape: Shape, plan: Plan, rows: Sequence[Tensor]) -> bool:
    """Whether a map has two groups of many degrees, and few enough of them to stay at hand."""
    fits = plan.is_wide and not plan.identity and plan.num_groups == 2 and plan.tiles.shape[1] <= MOST_TILES
    return fits and _takes(shape, rows, (64,))


def _takes(shape: Shape, rows: Sequence[Tensor], padded_widths: tuple[int, ...]) -> bool:
    """Whether heads, padded, are of one of these widths, in bfloat16."""
    fits = shape.block_d == shape.block_v and shape.block_d in padded_widths and shape.dtype == torch.bfloat16
    return fits and all(is_aligned(x) for x in rows) and has_kernels(rows[0].device)


def is_aligned(x: Tensor) -> bool:
    numbers = x.shape[-1], *x.stride()[:-1], x.data_ptr()
    return not any(number % _ALIGNED for number in numbers)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether a GPU is Hopper's, and Triton has a Gluon in which they can be written: it is experimental."""
    is_cuda = device.type == "cuda" and torch.version.cuda is not None
    if not is_cuda or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from triton.experimental.gluon import language

        from schoenbat.ops.triton import (  # noqa: F401
            causal_hopper_keys,
            causal_hopper_wide_keys,
            degrees_hopper_backward,
        )
    except (ImportError, AttributeError):
        return False
    return hasattr(language, "num_warps")  # from Triton 3.6 on


def widths(shape: Shape, plan: Plan, heads: int, unit: Unit) -> dict[str, Any]:
    """What all of these kernels are compiled for."""
    return {
        "HEADS": heads,
        "MAPS": plan.tiles.shape[0],
        "UNIT": unit.code,
        "DIM": shape.dim,
        "DV": shape.value_dim,
        "D": shape.block_d,
        "V": shape.block_v,
    }
