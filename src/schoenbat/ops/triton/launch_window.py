"""Launch the kernels of exact near, linear far; what holds for `launch` holds here."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.ops.triton.axis import Axis
from schoenbat.ops.triton.call import Shape, Unit, as_rows, cdiv, flat, map_arguments, over_groups, per_map
from schoenbat.ops.triton.kernels import window, window_backward, window_sums
from schoenbat.ops.triton.launch_running_sums import sums_along
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.programs import sum_rows
from schoenbat.ops.triton.tiles import FUSED, Tiles, window_tiles_for


class Near(NamedTuple):
    """Which keys are near."""

    width: int
    is_causal: bool


class Rows(NamedTuple):
    """Queries, keys and values ``(B, heads, n, ·)``; those that far pairs are seen by may be others."""

    query: Tensor
    key: Tensor
    far_query: Tensor
    far_key: Tensor
    value: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, far: Sequence[Tensor]) -> "Rows":
        q, k = as_rows(query), as_rows(key)
        far_q, far_k = (as_rows(x) for x in far) if far else (q, k)
        return cls(q, k, far_q, far_k, as_rows(value))

    @property
    def strides(self) -> list[int]:
        return [step for x in self for step in x.stride()[:3]]


class Call(NamedTuple):
    """How a sequence is cut, and what all kernels take."""

    axis: Axis
    shape: Shape
    plan: Plan
    near: Near
    tiles: Tiles
    heads: int  # of queries, over the batch

    @classmethod
    def of(cls, query: Tensor, value: Tensor, plan: Plan, near: Near) -> "Call":
        shape, length = Shape.of(query, value), query.shape[-2]
        axis = Axis.of(length, length, shape, plan)
        whole = cdiv(axis.num_tiles, axis.chunk) * axis.chunk
        axis = axis._replace(num_tiles=whole, seen_by_all=0 if near.is_causal else length)
        tiles = window_tiles_for(shape.dtype, shape.block_d, shape.block_v, plan.quadratic)
        near = near._replace(width=min(near.width, length))
        return cls(axis, shape, plan, near, tiles, shape.batch * shape.heads * shape.groups)

    @property
    def span(self) -> int:
        return self.axis.chunk * self.axis.tiles.block

    @property
    def chunks(self) -> int:
        return self.axis.num_tiles // self.axis.chunk

    @property
    def reach(self) -> int:
        return cdiv(self.near.width, self.span)

    @property
    def row_tiles(self) -> int:
        return cdiv(self.axis.queries, self.tiles.block)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.axis.queries, self.near.width, self.reach, self.chunks

    def constants(self, mask: Tensor | None, far: Sequence[Tensor]) -> dict[str, Any]:
        return {
            "HEADS": self.shape.heads * self.shape.groups,
            "GROUPS": self.shape.groups,
            "HAS_MASK": mask is not None,
            "IS_CAUSAL": self.near.is_causal,
            "SEPARATE": bool(far),
            "SPAN": self.span,
            **self.shape.constants(self.plan, self.tiles),
        }


def sizes(call: Call, heads: int) -> list[tuple[int, ...]]:
    """Of the sums that each chunk meets: see `window_sums.combine`."""
    features, lead = call.plan.num_features, (heads, call.chunks)
    widths = (features, call.shape.block_v), (features,), (call.shape.block_d,), (call.shape.block_v,), ()
    return [(*lead, *width) for width in widths]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far: Sequence[Tensor],
    mask: Tensor | None,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    log_weight: Tensor,
    key_scale: float,
    near: Near,
) -> list[Tensor]:
    """Outputs; what the backward pass starts from: four values for each row, and five sums for each chunk.

    `far` holds query and key as the features see them, or nothing where they see the same.
    """
    call, rows = Call.of(query, value, plan, near), Rows.of(query, key, value, far)
    sums = _sums(rows.far_key, rows.value, mask, None, call, None, key_scale)
    out = query.new_empty(*query.shape[:-1], call.shape.value_dim)
    by_row = [rows.query.new_empty(rows.query.shape[:-1], dtype=torch.float32) for _ in range(4)]
    window.read[(call.row_tiles * call.heads,)](
        *(*rows, flat(mask, key), _counts(mask, call, key), query_scale, log_weight),
        *(per_map(coefficients, plan), out, *by_row, *sums),
        *(*rows.strides, *call.lengths, key_scale, *map_arguments(plan)),
        **call.constants(mask, far),
    )
    return [out, *by_row, *sums]


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far: Sequence[Tensor],
    mask: Tensor | None,
    saved: Sequence[Tensor],  # what `attend` gave
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    log_weight: Tensor,
    key_scale: float,
    near: Near,
) -> list[Tensor]:
    """Gradients of query, key, value, query_scale and log_weight, and of both `far` if there are any."""
    call, rows = Call.of(query, value, plan, near), Rows.of(query, key, value, far)
    g, out, (log_total, inverse, constant, slope) = as_rows(grad.to(query.dtype)), saved[0], saved[1:5]
    shared = call.constants(mask, far)
    programs, strides = (call.row_tiles * call.heads,), (*rows.strides, *g.stride()[:3])
    grad_query = rows.query.new_empty(rows.query.shape)
    grad_far_query = torch.empty_like(grad_query) if far else grad_query
    delta, to_total, to_mean = (torch.empty_like(inverse) for _ in range(3))
    to_scale, to_weight = (inverse.new_empty(*inverse.shape[:2], call.row_tiles) for _ in range(2))
    window_backward.query_backward[programs](
        *(*rows, flat(mask, key), _counts(mask, call, key), query_scale, per_map(coefficients, plan)),
        *(g, as_rows(out), log_total, inverse, constant, slope, *saved[5:]),
        *(grad_query, grad_far_query, delta, to_total, to_mean, to_scale, to_weight),
        *(*strides, *call.lengths, key_scale, *map_arguments(plan)),
        **shared,
    )
    by_row = inverse, constant, to_total, to_mean
    sums = _sums(rows.far_query, g, None, by_row, call, query_scale, key_scale)
    # Each query head gives a gradient to the key head it shares: added up afterwards, in float32.
    dtype = query.dtype if call.shape.groups == 1 else torch.float32
    lead = *rows.query.shape[:2], key.shape[-2]
    grad_key, grad_value = (query.new_empty(*lead, x.shape[-1], dtype=dtype) for x in (key, value))
    grad_far_key = torch.empty_like(grad_key) if far else grad_key
    window_backward.key_backward[programs](
        *(*rows, flat(mask, key), query_scale, g, log_total, inverse, constant, delta, to_total, to_mean),
        *(*sums, grad_key, grad_far_key, grad_value),
        *(*strides, *call.lengths, key_scale, *map_arguments(plan)),
        **shared,
    )
    grads = [
        grad_query.view(query.shape),
        over_groups(grad_key, key),
        over_groups(grad_value, value),
        to_scale.sum((0, 2)).view(query_scale.shape),
        to_weight.sum((0, 2)).view(log_weight.shape),
    ]
    if not far:
        return grads
    return [*grads, grad_far_query.view(query.shape), over_groups(grad_far_key, key)]


def _sums(
    x: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    by_row: Sequence[Tensor] | None,
    call: Call,
    query_scale: Tensor | None,
    key_scale: float,
) -> list[Tensor]:
    """What each chunk meets of all keys and values, or of all queries and output gradients."""
    axis, shape, plan, heads = call.axis, call.shape, call.plan, x.shape[0] * x.shape[1]
    axes = [axis] if call.near.is_causal else [axis, axis._replace(backwards=True)]
    ends = [
        sums_along(x, rows, mask, by_row, None, None, shape, plan, one, query_scale, key_scale, Unit())[0]
        for one in axes
    ]
    shapes = sizes(call, heads)
    sums = [x.new_empty(size, dtype=torch.float32 if i else x.dtype) for i, size in enumerate(shapes)]
    rows_each = sum_rows(plan, heads * call.chunks)
    window_sums.combine[(heads * call.chunks, max(1, cdiv(plan.num_features, rows_each)))](
        *(*ends[0], *ends[-1], *sums),
        *(-axis.seen_by_all, *axis.cut, call.reach, plan.num_features),
        TWO_SIDED=not call.near.is_causal,
        HAS_FAR=axis.has_far,
        AFTER=by_row is not None,
        CHUNK=axis.chunk,
        ROWS=rows_each,
        BLOCK_D=shape.block_d,
        BLOCK_V=shape.block_v,
        BLOCK=axis.tiles.block,
        **FUSED,
    )
    return sums


def _counts(mask: Tensor | None, call: Call, instead: Tensor) -> Tensor:
    """How many far keys each row sees, ``(B, n)``; without a mask the kernels know."""
    if mask is None:
        return instead
    lag, length = call.near.width + 1, call.axis.keys
    taking_part = mask.flatten(1)
    ends = [taking_part] if call.near.is_causal else [taking_part, taking_part.flip(1)]
    counts = [F.pad(x.cumsum(1, dtype=torch.int32), (lag, 0))[:, :length] for x in ends]
    return (counts[0] if call.near.is_causal else counts[0] + counts[1].flip(1)).contiguous()
