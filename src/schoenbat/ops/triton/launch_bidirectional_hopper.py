"""Launch the kernels of bidirectional attention on Hopper, where a call is of the kind they are for.

All of them are for maps of many degrees, but for sums, which wide heads by pairs have, too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops.triton.call import Shape, Unit, cdiv, mask_bytes, per_map, summary_shapes
from schoenbat.ops.triton.hopper_calls import MOST_TILES, widths
from schoenbat.ops.triton.plan import Plan

_ROWS = 128
# As many as there are multiprocessors: each has room for one.
_PROGRAMS = 132


def _cut(rows: int, heads: int) -> tuple[int, int]:
    """How many programs share a sequence, and how many tiles each has."""
    tiles = max(1, cdiv(rows, _ROWS))
    each = cdiv(tiles, max(1, min(tiles, _PROGRAMS // heads)))
    return cdiv(tiles, each), each


def _form_sums(
    kernel: Any,
    of_map: Sequence[Any],
    compiled_for: dict[str, Any],
    x: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    by_row: Sequence[Tensor] | None,
    shape: Shape,
    plan: Plan,
    query_scale: Tensor | None,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """As in `launch`: parts of the sums over keys, or over queries with what they have `by_row`."""
    heads, n = x.shape[0] * x.shape[1], x.shape[-2]
    splits, each = _cut(n, heads)
    shapes = ((heads * splits, *size) for size in summary_shapes(shape, plan))
    sums = [x.new_empty(size, dtype=torch.float32) for size in shapes]
    kernel[(heads * splits,)](
        *(x, rows, mask_bytes(mask), query_scale, *(by_row or (None, None, None)), *sums),
        *(*x.stride()[:3], *rows.stride()[:3], n, each, splits, key_scale, unit.eps, *of_map),
        **compiled_for,
    )
    return sums


def constants_of_degrees(
    shape: Shape, plan: Plan, heads: int, unit: Unit, groups: int | None = None
) -> dict[str, Any]:
    """What kernels are compiled for; `groups` of those that go through queries."""
    of_queries = {} if groups is None else {"GROUPS": groups}
    return widths(shape, plan, heads, unit) | of_queries | {"HELD": MOST_TILES, "num_warps": 8}


def constants_of_pairs(shape: Shape, plan: Plan, heads: int, unit: Unit) -> dict[str, Any]:
    """The same for sums of pairs."""
    own = {"GROUPS": shape.groups, "F": plan.num_groups * plan.group}
    return widths(shape, plan, heads, unit) | own | {"num_warps": 8}


def _map(plan: Plan) -> tuple[Any, ...]:
    return plan.tiles, plan.root_weight, plan.degrees, plan.first, plan.tiles.shape[1]


def summarize_degrees(
    x: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    by_row: Sequence[Tensor] | None,
    shape: Shape,
    plan: Plan,
    query_scale: Tensor | None,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """See `_form_sums`."""
    from schoenbat.ops.triton.hopper import degrees

    compiled_for = constants_of_degrees(shape, plan, x.shape[1], unit, shape.groups)
    call = x, rows, mask, by_row, shape, plan, query_scale, key_scale, unit
    return _form_sums(degrees.summarize, _map(plan), compiled_for, *call)


def summarize_pairs(
    x: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    by_row: Sequence[Tensor] | None,
    shape: Shape,
    plan: Plan,
    query_scale: Tensor | None,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """See `_form_sums`."""
    from schoenbat.ops.triton.hopper import bidirectional_wide

    of_map = plan.tiles, plan.root_weight, plan.root_linear, plan.tiles.shape[1]
    compiled_for = constants_of_pairs(shape, plan, x.shape[1], unit)
    call = x, rows, mask, by_row, shape, plan, query_scale, key_scale, unit
    return _form_sums(bidirectional_wide.summarize, of_map, compiled_for, *call)


def read(
    q: Tensor,
    out: Tensor,
    summary: Sequence[Tensor],
    shape: Shape,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    unit: Unit,
) -> None:
    """Each query row's output, into `out`."""
    from schoenbat.ops.triton.hopper import degrees

    heads = q.shape[0] * q.shape[1]
    splits, each = _cut(q.shape[-2], heads)
    degrees.read[(splits * heads,)](
        *(q, out, query_scale, *summary, per_map(coefficients, plan)),
        *(*q.stride()[:3], q.shape[-2], each, splits, unit.eps, *_map(plan)),
        **constants_of_degrees(shape, plan, q.shape[1], unit, shape.groups),
    )


def read_backward(
    q: Tensor,
    g: Tensor,
    summary: Sequence[Tensor],
    shape: Shape,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    unit: Unit,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of queries, and of the scale by program; by row 1/f and those of total and mean logit."""
    from schoenbat.ops.triton.hopper import degrees_backward

    heads = q.shape[0] * q.shape[1]
    splits, each = _cut(q.shape[-2], heads)
    grad_query, to_scale = q.new_empty(q.shape), q.new_empty(*q.shape[:2], splits, dtype=torch.float32)
    by_row = [q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(3)]
    degrees_backward.read_backward[(splits * heads,)](
        *(q, g, grad_query, *by_row, to_scale, query_scale, *summary[:3], per_map(coefficients, plan)),
        *(*q.stride()[:3], *g.stride()[:3], q.shape[-2], each, splits, unit.eps, *_map(plan)),
        **constants_of_degrees(shape, plan, q.shape[1], unit, shape.groups),
    )
    return grad_query, to_scale, by_row


def key_backward(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    to_summary: Sequence[Tensor],
    centre: Tensor,
    shape: Shape,
    plan: Plan,
    key_scale: float,
    unit: Unit,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values."""
    from schoenbat.ops.triton.hopper import degrees_backward

    heads = k.shape[0] * k.shape[1]
    splits, each = _cut(k.shape[-2], heads)
    to_sums, to_totals, to_key, to_value = to_summary
    grad_key, grad_value = k.new_empty(k.shape), v.new_empty(v.shape)
    degrees_backward.key_backward[(splits * heads,)](
        *(k, v, mask_bytes(mask), grad_key, grad_value, to_sums, to_totals, to_key, centre, to_value),
        *(*k.stride()[:3], *v.stride()[:3], k.shape[-2], each, splits, key_scale, unit.eps, *_map(plan)),
        **constants_of_degrees(shape, plan, k.shape[1], unit),
    )
    return grad_key, grad_value
