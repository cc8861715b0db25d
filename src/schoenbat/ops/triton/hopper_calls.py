"""Which calls the kernels for Hopper's warp groups take, and what they have in common: see `warp_groups`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops.triton.call import Shape, Unit
from schoenbat.ops.triton.layout import padded
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.tiles import FUSED

# Copies of 16 bytes want rows that begin at multiples of it; Triton knows of multiples of 16 numbers alone.
_ALIGNED = 16
# The narrowest product, that of y = Pᵀx; `warp_groups` says so, too, but cannot be imported everywhere.
_NARROW = 16
# Tiles of directions that shared memory has room for beside rows and sums. Each group has one, so that
# none has more than 16.
MOST_TILES = 17
# Causal kernels have sums, scores and both sides of them.
MOST_CAUSAL_TILES = 12


def takes_pairs(shape: Shape, plan: Plan, query: Tensor, key: Tensor) -> bool:
    """Whether a map has identity features, and about as many pairs as causal kernels have room for.

    They go through all positions, whether there are queries, or keys, or both. Tensors may be fake: it is not
    asked where they begin in memory, nor by which steps they go.
    """
    # Of narrow heads, identity features and pairs are two groups of 64 together.
    pairs = plan.monomials - shape.dim
    fits = pairs <= 96 if is_narrow(shape) else plan.num_groups * plan.group == shape.block_d
    fits = fits and plan.identity and plan.quadratic == 1 and plan.group == 64
    fits = fits and not shape.dim % _ALIGNED and not shape.value_dim % _ALIGNED
    fits = fits and _fits(shape, (32, 64, 128)) and has_kernels(query.device)
    # Last: lengths that are symbols are decided upon only where it matters.
    return fits and _has_both(query.shape[-2], key.shape[-2])


def _has_both(queries: int, keys: int) -> bool:
    """Whether there are queries and keys at most positions."""
    # Not by sym_max, which torch before 2.13 compiles of symbols alone, nor by max, which asks which is more.
    return 0 < queries <= 2 * keys and keys <= 2 * queries


def goes_in_one_pass(shape: Shape, plan: Plan, query: Tensor, key: Tensor) -> bool:
    """Whether Hopper's own causal kernels take a call; wide groups have no other kernels."""
    if not plan.is_wide:
        return takes_pairs(shape, plan, query, key)
    if not has_kernels(query.device):
        raise ValueError(f"the map is laid out for Hopper's kernels, which {query.device} has not")
    return True


def may_take_causal_degrees(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether causal attention by many degrees has kernels of its own, for maps of few tiles.

    It is asked before the map is laid out (then see `takes_causal_degrees`), and of tensors that may be fake:
    not where they begin in memory.
    """
    fits = all(padded(x.shape[-1]) == 64 and not x.shape[-1] % _ALIGNED for x in (query, value))
    fits = fits and query.dtype == torch.bfloat16 and _has_both(query.shape[-2], key.shape[-2])
    return fits and _knows(query.device)


def takes_causal_degrees(plan: Plan) -> bool:
    """Whether a wide plan, which only a call that may be taken has, has two groups and few tiles."""
    return not plan.identity and 0 < plan.held <= MOST_CAUSAL_TILES


@torch.compiler.assume_constant_result
def _knows(device: torch.device) -> bool:
    return has_kernels(device)


def takes_degrees(shape: Shape, plan: Plan, rows: Sequence[Tensor]) -> bool:
    """Whether a map has two groups of many degrees, and few enough of them to stay at hand."""
    return not plan.identity and 0 < plan.held <= MOST_TILES and _takes(shape, rows, (64,))


def takes_sums_of_pairs(shape: Shape, plan: Plan, rows: Sequence[Tensor]) -> bool:
    """Whether a map has identity features and two groups of pairs, and heads are as wide as both together.

    Then all sums fit the registers at once.
    """
    fits = plan.identity and plan.quadratic == _NARROW and plan.group == 64
    fits = fits and plan.num_groups * plan.group == shape.block_d
    return fits and _takes(shape, rows, (128,))


def _takes(shape: Shape, rows: Sequence[Tensor], blocks: tuple[int, ...]) -> bool:
    return _fits(shape, blocks) and all(is_aligned(x) for x in rows) and has_kernels(rows[0].device)


def _fits(shape: Shape, blocks: tuple[int, ...]) -> bool:
    """Whether heads are of a width that there are kernels for, in bfloat16."""
    return shape.block_d == shape.block_v and shape.block_d in blocks and shape.dtype == torch.bfloat16


def is_narrow(shape: Shape) -> bool:
    """Whether a product of the channels has fewer rows than warp groups multiply."""
    return shape.block_d <= 32


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

        from schoenbat.ops.triton.hopper import (  # noqa: F401
            bidirectional_wide,
            causal_degrees_keys,
            causal_keys,
            causal_narrow_keys,
            causal_wide_keys,
            degrees_backward,
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
        **FUSED,
    }
