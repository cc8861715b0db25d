"""Launch the kernels of sums along a sequence; what holds for `launch` holds here.

They are what lies before each chunk, or behind it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from schoenbat.ops.triton.axis import Axis, near_sizes, num_parts, segment_sizes
from schoenbat.ops.triton.call import Shape, Unit, cdiv, earlier, flat, map_arguments
from schoenbat.ops.triton.kernels import causal_sums
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.programs import sum_rows
from schoenbat.ops.triton.tiles import FUSED, is_of_one_group

# Numbers of a sum that a program of `scan` goes through: more of them would not fit the registers.
_SCANNED = 4096


def sums_along(
    x: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    by_row: Sequence[Tensor] | None,
    before: list[Tensor] | None,
    count: Tensor | None,
    shape: Shape,
    plan: Plan,
    axis: Axis,
    query_scale: Tensor | None,
    key_scale: float,
    unit: Unit,
) -> tuple[list[Tensor], list[Tensor]]:
    """The eight sums over keys and values, or over queries and output gradients: see the kernels.

    Where nothing is far, the four near ones stand for those that no kernel reads. Then what `before` does not
    enter: the four sums over each segment.
    """
    heads, after = x.shape[0] * x.shape[1], by_row is not None
    first, parts_each = axis.first_query if after else axis.first_key, num_parts(axis.tiles, plan)
    x_rows, x_strides, row_rows, row_strides = x, x.stride()[:3], rows, rows.stride()[:3]
    if axis.backwards:
        first = axis.num_tiles * axis.tiles.block - x.shape[-2]
        mask = None if mask is None else mask.flip(-2)
        by_row = None if by_row is None else [values.flip(-1) for values in by_row]
        (x_rows, x_strides), (row_rows, row_strides) = _from_the_end(x), _from_the_end(rows)
    first_key = axis.first_key - axis.seen_by_all
    segments = segment_sizes(axis, shape, plan)
    near, parts = _empty(x, near_sizes(axis, shape, plan), x.dtype), _empty(x, segments, torch.float32)
    causal_sums.accumulate[(parts_each * axis.segments * heads,)](
        *(x_rows, row_rows, flat(mask, x), x if query_scale is None else query_scale),
        *(*(by_row or (x, x, x, x)), *near, *parts, earlier(count, x), *x_strides, *row_strides),
        *(x.shape[-2], first, first_key, *axis.cut, key_scale, unit.eps, *map_arguments(plan)),
        HEADS=x.shape[1],
        GROUPS=shape.groups if after else 1,
        HAS_MASK=mask is not None,
        HAS_STATE=count is not None,
        IS_QUERY=after,
        PARTS=parts_each,
        SINGLE=is_of_one_group(axis.tiles, plan),
        UNIT=unit.code,
        CHUNK=axis.chunk,
        **shape.constants(plan, axis.tiles),
    )
    if not axis.has_far and count is None:
        return [*near, *near], parts
    far = _empty(x, segments, x.dtype)
    # Of wide values fewer: the sums of five segments are held in registers at a time.
    rows_each = min(sum_rows(plan, heads), _SCANNED // shape.block_v)
    causal_sums.scan[(heads, max(1, cdiv(plan.num_features, rows_each)))](
        *(*parts, *far, *(before or parts), earlier(count, x)),
        *(first_key, *axis.cut, plan.num_features),
        HEADS=x.shape[1],
        HAS_STATE=count is not None,
        AFTER=after,
        ROWS=rows_each,
        BLOCK_D=shape.block_d,
        BLOCK_V=shape.block_v,
        BLOCK=axis.tiles.block,
        **FUSED,
    )
    return [*near, *far], parts


def _empty(x: Tensor, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Four sums of every head, the first of them in `dtype`."""
    heads = x.shape[0] * x.shape[1]
    dtypes = dtype, *[torch.float32] * 3
    return [x.new_empty(heads, *size, dtype=own) for size, own in zip(sizes, dtypes, strict=True)]


def _from_the_end(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The last row, and the strides by which a kernel goes back from there."""
    batch, head, row = x.stride()[:3]
    return x[..., -1:, :], (batch, head, -row)
