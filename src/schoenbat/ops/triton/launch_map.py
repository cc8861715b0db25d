"""Launch the kernels that give a trained map its gradients; what holds for `launch` holds here.

Directions (linear, quadratic, tail), weights and coefficients get gradients. One kernel makes three passes:
queries give to the tiles of directions, keys do, queries give to the identity features. Each program has an
entry of its own, and the entries are added up here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.blocks import sum_over_heads
from schoenbat.ops.triton.axis import Axis, row_counts
from schoenbat.ops.triton.call import Shape, Unit, as_rows, cdiv, flat, map_arguments
from schoenbat.ops.triton.kernels import bidirectional_map, causal_map
from schoenbat.ops.triton.plan import Plan, narrowed, take_out
from schoenbat.ops.triton.programs import split
from schoenbat.ops.triton.tiles import Tiles, tiles_for, tiles_of_map


class Pass(NamedTuple):
    """One pass of a kernel over the rows of some heads."""

    is_query: bool
    is_linear: bool  # for the identity features
    programs: int
    splits: int  # programs that share a head's rows
    tiles_each: int
    parts: Tensor  # (B, heads, splits, T, block_d, group), or (B, heads, splits, block_d)

    @property
    def constants(self) -> dict[str, bool]:
        return {"IS_QUERY": self.is_query, "LINEAR": self.is_linear}


def bidirectional(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    summary: Sequence[Tensor],
    by_row: Sequence[Tensor],
    to_summary: Sequence[Tensor],
    plan: Plan,
    trained: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Gradients of the first four of `trained` (see `plan.trained_map`) and of the coefficients.

    `by_row` are 1/f and the gradients of total, mean logit and f, divided by the count as sums are.
    """
    shape = Shape.of(query, value)
    q, k, v, g = as_rows(query), as_rows(key), as_rows(value), as_rows(grad.to(query.dtype))
    inverse, to_total, to_mean, to_floored = by_row
    plan = narrowed(plan)
    tiles = tiles_for(shape.dtype, shape.block_d, shape.block_v, quadratic=False, device=query.device)
    tiles = tiles_of_map(tiles, shape.dtype)

    def run(own: Pass) -> None:
        x, rows, own_mask, sums = (q, g, None, summary) if own.is_query else (k, v, mask, to_summary)
        bidirectional_map.map_backward[(own.programs,)](
            *(x, rows, flat(own_mask, x), query_scale, inverse, to_total, summary[3], *sums[:2], own.parts),
            *(*x.stride()[:3], *rows.stride()[:3], x.shape[-2], own.tiles_each, own.splits, key_scale),
            *(unit.eps, *map_arguments(plan)),
            HEADS=x.shape[1],
            GROUPS=shape.groups if own.is_query else 1,
            HAS_MASK=own_mask is not None,
            UNIT=unit.code,
            **own.constants,
            **shape.constants(plan, tiles),
        )

    row_tiles = [cdiv(x.shape[-2], tiles.block) for x in (q, k)]
    to_map = _passes(run, row_tiles, (q.shape[1], k.shape[1]), tiles, plan, trained, shape)
    # Where the floor acts, the gradient of f is not that of the total.
    by_row = to_floored, to_total != to_floored, to_mean, inverse
    return [*to_map, _coefficients(*by_row, inverse.new_ones(()), coefficients, shape)]


def causal(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    saved: Sequence[Tensor],
    by_row: Sequence[Tensor],
    sums: Sequence[Sequence[Tensor]],
    plan: Plan,
    trained: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """The same; `saved` is what `launch_causal.attend` gave, `by_row` the gradients of T, mean logit, f.

    `sums` are those over keys, which queries read, and those over queries.
    """
    if not by_row:  # there are no queries
        return [torch.zeros_like(x) for x in (*trained[:4], coefficients)]
    shape = Shape.of(query, value)
    q, k, v, g = as_rows(query), as_rows(key), as_rows(value), as_rows(grad.to(query.dtype))
    axis = Axis.of(q.shape[-2], k.shape[-2], shape, plan)
    plan, tiles, (inverse, constant) = narrowed(plan), tiles_of_map(axis.tiles, shape.dtype), saved[1:3]
    to_total, to_mean, to_floored = by_row
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3]
    positions = [axis.from_tile(first) for first in (axis.first_query, axis.first_key)]

    def run(own: Pass) -> None:
        near, near_totals, _, _, far, far_totals, _, _ = sums[not own.is_query]
        causal_map.map_backward[(own.programs,)](
            *(q, k, v, flat(mask, k), query_scale, g, inverse, to_total),
            *(near, near_totals, far, far_totals, own.parts, *strides, *positions[not own.is_query]),
            *(key_scale, unit.eps, own.tiles_each, own.splits, *map_arguments(plan)),
            HEADS=q.shape[1],
            GROUPS=shape.groups,
            HAS_MASK=mask is not None,
            HAS_FAR=axis.has_far,
            UNIT=unit.code,
            CHUNK=axis.chunk,
            **own.constants,
            **shape.constants(plan, tiles),
        )

    row_tiles = [axis.num_tiles - position[4] for position in positions]
    to_map = _passes(run, row_tiles, (q.shape[1], q.shape[1]), tiles, plan, trained, shape)
    count = row_counts(seen, axis, k)
    below = constant != _by_head(coefficients, inverse)[0]
    return [*to_map, _coefficients(to_floored, below, to_mean * count, inverse, count, coefficients, shape)]


def _passes(
    run: Callable[[Pass], None],
    row_tiles: Sequence[int],
    heads: Sequence[int],
    tiles: Tiles,
    plan: Plan,
    trained: Sequence[Tensor],
    shape: Shape,
) -> list[Tensor]:
    """Gradients of directions and weights by three passes; `row_tiles` and `heads`: of queries and of keys.

    ⟨ω, dω⟩ of a feature's first direction is 2 w dw: see `map_gradients`. So is 2 Σφ dφ over queries, which
    identity features have. What has no weight gets no gradient.
    """
    *maps, weight = trained[:4]

    def total(is_query: bool, *size: int, is_linear: bool = False) -> Tensor:
        own = heads[not is_query]
        others = shape.batch * own * (1 if is_linear else size[0])
        splits, tiles_each = split(max(1, row_tiles[not is_query]), others, tiles)
        parts = plan.root_weight.new_empty(shape.batch, own, splits, *size, dtype=torch.float32)
        if parts.numel():
            run(Pass(is_query, is_linear, others * splits, splits, tiles_each, parts))
        parts = parts.unflatten(1, (shape.heads, own // shape.heads))
        return sum_over_heads(plan.tiles, parts.sum((0, 2, 3)))

    to_tiles = total(True, *plan.tiles.shape[1:]) + total(False, *plan.tiles.shape[1:])
    along = (plan.tiles * to_tiles).index_select(1, plan.first[:-1]).sum(2).flatten(1)
    if plan.identity:
        identity = 2 * total(True, shape.block_d, is_linear=True)
        along = torch.cat([identity[:, : shape.dim], along], dim=-1)
    along = sum_over_heads(weight, along[:, : weight.shape[-1]])
    return [
        *(
            sum_over_heads(x, take_out(to_tiles, places)[:, : shape.dim])
            for x, places in zip(maps, trained[4:], strict=True)
        ),
        torch.where(weight > 0, along / (2 * weight), 0.0),
    ]


def _coefficients(
    to_floored: Tensor,
    below: Tensor,
    to_mean: Tensor,
    inverse: Tensor,
    count: Tensor,
    coefficients: Tensor,
    shape: Shape,
) -> Tensor:
    """Their gradients, ``(M, 3)``, from those of f and the mean logit of each row, ``(B, H·G, n)``.

    Where `below`, f is the floor, count · a₀ · exp(slope · mean logit); else count · constant is in it.
    """
    _, zeroth, slope = _by_head(coefficients, inverse)
    unit_floor = 1 / (inverse * zeroth)
    exponent = (unit_floor / count).log()
    per_row = [
        torch.where(below, 0.0, to_floored * count),
        torch.where(below, to_floored * unit_floor, 0.0),
        torch.where(to_mean == 0, 0.0, to_mean * exponent / slope.square()),
    ]
    per_head = torch.stack([x.sum((0, 2)) for x in per_row], dim=-1)
    return sum_over_heads(coefficients, per_head.unflatten(0, (shape.heads, shape.groups)).sum(1))


def _by_head(coefficients: Tensor, rows: Tensor) -> Tensor:
    """``(M, 3) -> (3, H·G, 1)``, beside rows ``(B, H·G, n)``."""
    return coefficients.repeat_interleave(rows.shape[1] // coefficients.shape[0], 0).mT[..., None]
