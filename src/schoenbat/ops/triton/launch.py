"""Launch the bidirectional kernels, with the small sums between one kernel and the next.

Nothing here waits for the device, and nothing is timed at run time: the same shapes always run the same code
in the same order, so two runs are bit-equal. Shapes are those of `eager`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from schoenbat.ops.triton import launch_bidirectional_hopper
from schoenbat.ops.triton.call import Shape, Unit, as_rows, cdiv, flat, map_arguments, per_map, summary_shapes
from schoenbat.ops.triton.hopper_calls import takes_degrees, takes_sums_of_pairs
from schoenbat.ops.triton.kernels import bidirectional, bidirectional_sums
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.programs import most_rows, split, sum_rows
from schoenbat.ops.triton.tiles import (
    FUSED,
    Tiles,
    tiles_of_gradients,
    tiles_of_read,
    tiles_of_sums,
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Outputs, then the sums, totals, key mean and value mean that the backward pass starts from."""
    shape, k = Shape.of(query, value), as_rows(key)
    parts = summarize(k, as_rows(value), mask, shape, plan, key_scale, unit)
    summary = finish(parts, _count(mask), key.shape[-2], shape, plan, k)
    return [read(query, summary, shape, plan, coefficients, query_scale, unit), *summary]


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    summary: Sequence[Tensor],
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
    trained: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of query, key, value and query_scale; what those of a map start from: see `launch_map`."""
    shape, count = Shape.of(query, value), _count(mask)
    small = plan, coefficients, query_scale, unit, trained
    grad_query, to_scale, parts, by_row = read_backward(grad, query, summary, shape, *small)
    to_summary = finish_backward(parts, count, key.shape[-2], summary[1], shape, plan, shape.dtype)
    to_keys = key_backward(key, value, mask, to_summary, summary[3], shape, plan, key_scale, unit)
    return [grad_query, *to_keys, to_scale], by_row, to_summary


def summarize(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    shape: Shape,
    plan: Plan,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Parts of Σφ(k)vᵀ, Σφ(k), Σk and Σv of each key head, ``(B·H·splits, ...)`` in float32."""
    return _summarize(key, value, mask, None, shape._replace(groups=1), plan, None, key_scale, unit)


def finish(
    parts: Sequence[Tensor], count: Tensor | None, keys: int, shape: Shape, plan: Plan, like: Tensor
) -> list[Tensor]:
    """Sums, totals, key mean and value mean of each key head, ``(B·H, ...)``.

    `count` is how many keys take part in each sequence, ``(B,)``; None for all `keys`.
    """
    heads = shape.batch * shape.heads
    summary = _empty_summary(heads, shape, plan, like, shape.dtype)
    rows = sum_rows(plan, heads)
    bidirectional_sums.finish[(heads, max(1, cdiv(plan.num_features, rows)))](
        *(*parts, like if count is None else count, *summary),
        *(keys, parts[0].shape[0] // heads, plan.num_features),
        HEADS=shape.heads,
        HAS_MASK=count is not None,
        ROWS=rows,
        BLOCK_D=shape.block_d,
        BLOCK_V=shape.block_v,
        **overlapping(like),
        **FUSED,
    )
    return summary


def read(
    query: Tensor,
    summary: Sequence[Tensor],
    shape: Shape,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    unit: Unit,
) -> Tensor:
    """Each query row's output."""
    q, tiles = as_rows(query), tiles_of_read(shape.tiles(plan), plan)
    out = query.new_empty(*query.shape[:-1], shape.value_dim)
    if out.numel() and takes_degrees(shape, plan, [q]):
        launch_bidirectional_hopper.read(q, out, summary, shape, plan, coefficients, query_scale, unit)
    elif out.numel():
        splits, tiles_each = split(_row_tiles(q, tiles), q.shape[0] * q.shape[1], tiles)
        bidirectional.read[(splits * q.shape[0] * q.shape[1],)](
            *(q, out, query_scale, *summary, per_map(coefficients, plan)),
            *(*q.stride()[:3], q.shape[-2], tiles_each, splits, unit.eps, *map_arguments(plan)),
            HEADS=q.shape[1],
            GROUPS=shape.groups,
            UNIT=unit.code,
            WHOLE=plan.whole,
            **shape.constants(plan, tiles),
            **overlapping(q),
        )
    return out


def read_backward(
    grad: Tensor,
    query: Tensor,
    summary: Sequence[Tensor],
    shape: Shape,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    unit: Unit,
    trained: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Gradients of query and query_scale; parts of those of the summary, ``(B·H·G·splits, ...)``.

    Then by row 1/f and the gradients of total and mean logit, and of f itself if the map is `trained`.
    """
    q, g = as_rows(query), as_rows(grad.to(query.dtype))
    if q.numel() and not trained and takes_degrees(shape, plan, [q, g]):
        small = shape, plan, coefficients, query_scale, unit
        grad_query, to_scale, by_row = launch_bidirectional_hopper.read_backward(q, g, summary, *small)
        parts = _summarize(q, g, None, by_row, shape, plan, query_scale, 1.0, unit)
        return grad_query.view(query.shape), to_scale.sum((0, 2)).view(query_scale.shape), parts, by_row
    sums, totals, key_mean, _ = summary
    grad_query = q.new_empty(q.shape)
    by_row = [q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(4 if trained else 3)]
    tiles, whole = tiles_of_gradients(shape.tiles(plan), plan), plan.whole
    splits, tiles_each = _row_tiles(q, tiles), 1
    if whole:
        splits, tiles_each = split(splits, q.shape[0] * q.shape[1], tiles)
    to_scale = q.new_empty(q.shape[0], q.shape[1], splits, dtype=torch.float32)
    if q.numel():
        bidirectional.read_backward[(to_scale.numel(),)](
            *(q, g, grad_query, *by_row[:3], by_row[-1], to_scale, query_scale, sums, totals, key_mean),
            *(per_map(coefficients, plan), *q.stride()[:3], *g.stride()[:3], q.shape[-2], tiles_each, splits),
            *(unit.eps, *map_arguments(plan)),
            HEADS=q.shape[1],
            GROUPS=shape.groups,
            UNIT=unit.code,
            WHOLE=whole,
            TRAINED=trained,
            **shape.constants(plan, tiles),
        )
    else:
        to_scale.zero_()
    parts = _summarize(q, g, None, by_row[:3], shape, plan, query_scale, 1.0, unit)
    return grad_query.view(query.shape), to_scale.sum((0, 2)).view(query_scale.shape), parts, by_row


def finish_backward(
    parts: Sequence[Tensor],
    count: Tensor | None,
    keys: int,
    totals: Tensor,
    shape: Shape,
    plan: Plan,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Gradients of sums (in `dtype`) and totals, and what each key and each value gets through the means."""
    heads = shape.batch * shape.heads
    to_summary = _empty_summary(heads, shape, plan, totals, dtype)
    bidirectional_sums.finish_backward[(heads, shape.block_v // 16)](
        *(*parts, totals if count is None else count, totals, *to_summary),
        *(keys, parts[0].shape[0] // heads, plan.num_features),
        HEADS=shape.heads,
        HAS_MASK=count is not None,
        ROWS=most_rows(plan),
        COLUMNS=16,
        BLOCK_D=shape.block_d,
        BLOCK_V=shape.block_v,
        **FUSED,
    )
    return to_summary


def key_backward(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    to_summary: Sequence[Tensor],
    centre: Tensor,
    shape: Shape,
    plan: Plan,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Gradients of key and value, from those of the sums of φ(k)(v − centre)ᵀ: see `finish_backward`."""
    k, v = as_rows(key), as_rows(value)
    if k.numel() and takes_degrees(shape, plan, [k, v]):
        small = centre, shape, plan, key_scale, unit
        grad_key, grad_value = launch_bidirectional_hopper.key_backward(k, v, mask, to_summary, *small)
        return [grad_key.view(key.shape), grad_value.view(value.shape)]
    grad_key, grad_value = k.new_empty(k.shape), v.new_empty(v.shape)
    if k.numel():
        tiles, whole = tiles_of_gradients(shape.tiles(plan), plan), plan.whole
        splits, tiles_each = _row_tiles(k, tiles), 1
        if whole:
            splits, tiles_each = split(splits, k.shape[0] * k.shape[1], tiles)
        to_sums, to_totals, to_key, to_value = to_summary
        bidirectional.key_backward[(splits * k.shape[0] * k.shape[1],)](
            *(k, v, flat(mask, k), grad_key, grad_value, to_sums, to_totals, to_key, centre, to_value),
            *(*k.stride()[:3], *v.stride()[:3], k.shape[-2], tiles_each, splits, key_scale),
            *(unit.eps, *map_arguments(plan)),
            HEADS=k.shape[1],
            HAS_MASK=mask is not None,
            UNIT=unit.code,
            WHOLE=whole,
            **shape.constants(plan, tiles),
        )
    return [grad_key.view(key.shape), grad_value.view(value.shape)]


def _empty_summary(heads: int, shape: Shape, plan: Plan, like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    sums, *rest = summary_shapes(shape, plan)
    return [
        like.new_empty(heads, *sums, dtype=dtype),
        *(like.new_empty(heads, *size, dtype=torch.float32) for size in rest),
    ]


def overlapping(like: Tensor) -> dict[str, bool]:
    """For kernels that wait themselves for the one before: from Hopper on they start before it has ended."""
    is_new = like.is_cuda and torch.version.cuda and torch.cuda.get_device_capability(like.device)[0] >= 9
    return {"OVERLAPS": True, "launch_pdl": True} if is_new else {}


def _summarize(
    x: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    by_row: list[Tensor] | None,
    shape: Shape,
    plan: Plan,
    query_scale: Tensor | None,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Parts of Σφ(x) rowᵀ, Σφ(x) w, Σx u and Σrow, ``(B·H·splits, ...)``; see the kernel."""
    small = plan, query_scale, key_scale, unit
    if x.numel() and takes_degrees(shape, plan, [x, rows]):
        return launch_bidirectional_hopper.summarize_degrees(x, rows, mask, by_row, shape, *small)
    if x.numel() and takes_sums_of_pairs(shape, plan, [x, rows]):
        return launch_bidirectional_hopper.summarize_pairs(x, rows, mask, by_row, shape, *small)
    batch, heads, n, _ = x.shape
    tiles = tiles_of_sums(shape.tiles(plan), shape.block_d, shape.block_v)
    separate, num_parts = parts_of_sums(plan)
    # Parts take unequally long, most of all those of several degrees: of shorter programs none is left over.
    programs = batch * heads * num_parts // (4 if plan.is_uneven else 3 if num_parts > 1 else 1)
    splits, tiles_each = split(_row_tiles(x, tiles), programs, tiles)
    shapes = summary_shapes(shape, plan)
    sums = [x.new_empty(batch * heads * splits, *s, dtype=torch.float32) for s in shapes]
    bidirectional_sums.summarize[(num_parts * splits * batch * heads,)](
        *(x, rows, flat(mask, x), x if query_scale is None else query_scale, *(by_row or (x, x, x)), *sums),
        *(*x.stride()[:3], *rows.stride()[:3], n, tiles_each, splits, key_scale),
        *(unit.eps, *map_arguments(plan)),
        HEADS=heads,
        GROUPS=shape.groups,
        HAS_MASK=mask is not None,
        IS_QUERY=by_row is not None,
        PARTS=num_parts,
        SEPARATE=separate,
        UNIT=unit.code,
        **shape.constants(plan, tiles),
    )
    return sums


def parts_of_sums(plan: Plan) -> tuple[bool, int]:
    """Whether what has no group is a part of its own, and how many parts there are: see `summarize`."""
    separate = not plan.num_groups or (plan.num_groups > 1 and plan.identity)
    return separate, plan.num_groups + separate


def _row_tiles(x: Tensor, tiles: Tiles) -> int:
    return max(1, cdiv(x.shape[-2], tiles.block))


def _count(mask: Tensor | None) -> Tensor | None:
    """How many keys of each sequence take part, ``(B,)``; None for all."""
    return None if mask is None else mask.sum((1, 2, 3, 4), dtype=torch.int32)
