"""Launch the kernels of causal attention; what holds for `launch` holds here."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from schoenbat.ops.triton import launch_hopper
from schoenbat.ops.triton.call import Shape, Unit, as_rows, cdiv, flat, map_arguments, per_map
from schoenbat.ops.triton.hopper_calls import goes_in_one_pass
from schoenbat.ops.triton.kernels import causal, causal_keys, causal_sums
from schoenbat.ops.triton.launch import split, sum_rows
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.state import empty_state, lay_out, roots, take_out
from schoenbat.ops.triton.tiles import (
    Tiles,
    causal_tiles_for,
    causal_tiles_of_keys,
    causal_tiles_of_queries,
    causal_tiles_of_read,
    is_of_one_group,
)

# With so many heads each is one segment, about one program to a multiprocessor: more segments take less time
# for sums, but what is near and what is far then has to be added up by each kernel that reads them.
_MANY_HEADS = 120
# Numbers of a sum that a program of `scan` goes through: more of them would not fit the registers.
_SCANNED = 4096
# Of outputs, to a program: more gain nothing, and leave multiprocessors without work where heads are many.
_MOST_TILES = 8


class Axis(NamedTuple):
    """How queries and keys lie on the axis of positions, and how it is cut."""

    queries: int
    keys: int
    tiles: Tiles
    chunk: int  # tiles to a chunk
    num_tiles: int
    segments: int
    tiles_each: int  # tiles to a segment, whole chunks
    seen_by_all: int = 0  # about how many keys even the first row sees
    backwards: bool = False  # positions are counted from the end

    @classmethod
    def of(cls, queries: int, keys: int, shape: Shape, plan: Plan) -> "Axis":
        """Chunks so long that all their sums take no more memory than query, key, value and output."""
        tiles = causal_tiles_for(shape.dtype, shape.block_d, shape.block_v, plan.quadratic)
        rows = 2 * tiles.block * (shape.block_d + shape.block_v)
        # A map of constants alone has no features.
        chunk = max(1, cdiv(plan.num_features * shape.block_v, rows))
        num_tiles = max(1, cdiv(max(queries, keys), tiles.block))
        pieces, heads = cdiv(num_tiles, chunk), shape.batch * shape.heads
        # Groups of several degrees take unequally long, as in `launch`; but segments have to be scanned.
        programs = heads * max(1, plan.num_groups) // (2 if plan.is_uneven else 1)
        segments, chunks_each = (1, pieces) if heads >= _MANY_HEADS else split(pieces, programs, tiles)
        return cls(queries, keys, tiles, chunk, num_tiles, segments, chunk * chunks_each)

    @property
    def first_query(self) -> int:
        return max(0, self.keys - self.queries)

    @property
    def first_key(self) -> int:
        return max(0, self.queries - self.keys)

    @property
    def has_far(self) -> bool:
        """Whether there are segments before others."""
        return self.segments > 1

    @property
    def cut(self) -> tuple[int, int, int]:
        return self.tiles_each, self.segments, self.num_tiles

    def from_tile(self, position: int) -> tuple[int, ...]:
        """What kernels that work on single tiles take, from the tile of a position on."""
        tile = min(position // self.tiles.block, self.num_tiles - 1)
        return self.queries, self.keys, self.first_query, self.first_key, tile, *self.cut

    def programs(self, position: int, heads: int) -> tuple[int]:
        return ((self.num_tiles - self.from_tile(position)[4]) * heads,)


def num_parts(tiles: Tiles, plan: Plan) -> int:
    """Of `accumulate`: all in one, or one for each group and one for what has none."""
    return 1 if is_of_one_group(tiles, plan) else 1 + plan.num_groups


def near_sizes(axis: Axis, shape: Shape, plan: Plan) -> list[tuple[int, ...]]:
    """Of a head: sums and totals before each chunk, sums of x and of rows before each tile."""
    features, chunks = plan.num_features, cdiv(axis.num_tiles, axis.chunk)
    of_features = (chunks, features, shape.block_v), (chunks, features)
    return [*of_features, (axis.num_tiles, shape.block_d), (axis.num_tiles, shape.block_v)]


def _segment_sizes(axis: Axis, shape: Shape, plan: Plan) -> list[tuple[int, ...]]:
    """Of a head: the same of each segment."""
    sizes = (plan.num_features, shape.block_v), (plan.num_features,), (shape.block_d,), (shape.block_v,)
    return [(axis.segments, *size) for size in sizes]


def _empty(x: Tensor, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Four sums of every head, the first of them in `dtype`."""
    heads = x.shape[0] * x.shape[1]
    dtypes = dtype, *[torch.float32] * 3
    return [x.new_empty(heads, *size, dtype=own) for size, own in zip(sizes, dtypes, strict=True)]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    state: Sequence[Tensor],
    count: Tensor | None,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """Outputs, and what the backward pass starts from: three values of each row; sums of Hopper's kernels.

    With a mask, `seen` is what `keys_seen` gives.
    A sequence goes on from the four sums of a `state` of `count` keys, or (with none and None) from nothing.
    """
    shape = Shape.of(query, value)
    q, k, v = as_rows(query), as_rows(key), as_rows(value)
    _seen(seen, mask, k)
    if count is None and q.numel() and k.numel() and goes_in_one_pass(shape, plan, q, k):
        small = plan, coefficients, query_scale, key_scale, unit
        return launch_hopper.attend(query, key, value, mask, seen, *small)
    axis = Axis.of(q.shape[-2], k.shape[-2], shape, plan)
    sums = _sums_of_keys(k, v, mask, state, count, shape, plan, axis, key_scale, unit)
    out = query.new_empty(*query.shape[:-1], shape.value_dim)
    by_row = [q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(3)]
    if out.numel():
        heads, several = q.shape[0] * q.shape[1], is_of_one_group(axis.tiles, plan)
        programs, each = axis.programs(axis.first_query, 1)[0], 1
        if several:
            each = min(_MOST_TILES, split(programs, heads, axis.tiles)[1])
            programs = cdiv(programs, each)
        causal.read[(programs * heads,)](
            *(q, k, v, flat(mask, k), _seen(seen, mask, k), query_scale),
            *(per_map(coefficients, plan), out, *by_row, *sums, _earlier(count, k)),
            *(
                *q.stride()[:3],
                *k.stride()[:3],
                *v.stride()[:3],
                *axis.from_tile(axis.first_query),
                each,
                key_scale,
                unit.eps,
            ),
            *map_arguments(plan),
            HEADS=q.shape[1],
            GROUPS=shape.groups,
            HAS_MASK=mask is not None,
            HAS_STATE=count is not None,
            HAS_FAR=axis.has_far or count is not None,
            UNIT=unit.code,
            SINGLE=several,
            CHUNK=axis.chunk,
            **shape.constants(plan, causal_tiles_of_read(axis.tiles, plan)),
        )
    return [out, *by_row, q.new_empty(0, dtype=torch.float32)]


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    state: Sequence[Tensor],
    count: Tensor | None,
    saved: Sequence[Tensor],  # what `attend` gave
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
    trained: bool,
) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Gradients of query, key, value and query_scale, and of the state's four sums if there is one.

    Then what those of a `trained` map start from: see `launch_map`.

    The sums over keys are formed again, but for the few of Hopper's kernels: kept, they would take as much
    memory as query and key together or more, in every layer of a model.
    """
    shape, out, (inverse, constant, slope) = Shape.of(query, value), as_rows(saved[0]), saved[1:4]
    q, k, v, g = as_rows(query), as_rows(key), as_rows(value), as_rows(grad.to(query.dtype))
    axis, heads = Axis.of(q.shape[-2], k.shape[-2], shape, plan), q.shape[0] * q.shape[1]
    if not q.numel():
        to_state = [] if count is None else [x.zero_() for x in empty_state(query, value, plan)]
        return [*(torch.zeros_like(x) for x in (query, key, value, query_scale)), *to_state], [], []
    if count is None and not trained and k.numel() and goes_in_one_pass(shape, plan, q, k):
        inputs = grad, query, key, value, mask, seen, saved
        to_query, *to_rows, to_scale = launch_hopper.attend_backward(
            *inputs, plan, coefficients, query_scale, key_scale, unit
        )
        to_keys = (over_groups(x, like) for x, like in zip(to_rows, (key, value), strict=True))
        return [to_query.view(query.shape), *to_keys, to_scale.sum((0, 2)).view(query_scale.shape)], [], []
    shared = {
        "HEADS": q.shape[1],
        "GROUPS": shape.groups,
        "HAS_MASK": mask is not None,
        "HAS_STATE": count is not None,
        "HAS_FAR": axis.has_far or count is not None,
        "UNIT": unit.code,
        "CHUNK": axis.chunk,
        **shape.constants(plan, axis.tiles),
    }
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3]
    key_sums = _sums_of_keys(k, v, mask, state, count, shape, plan, axis, key_scale, unit)
    grad_query = q.new_empty(q.shape)
    to_total, to_mean = (torch.empty_like(inverse) for _ in range(2))
    to_floored = torch.empty_like(inverse) if trained else inverse
    programs = axis.programs(axis.first_query, heads)
    to_scale = inverse.new_empty(*q.shape[:2], programs[0] // heads)
    causal.query_backward[programs](
        *(q, k, v, flat(mask, k), _seen(seen, mask, k), query_scale),
        *(per_map(coefficients, plan), g, out, inverse, constant, slope, *key_sums),
        _earlier(count, k),
        *(grad_query, to_total, to_mean, to_floored, to_scale, *strides, *axis.from_tile(axis.first_query)),
        *(key_scale, unit.eps, *map_arguments(plan)),
        TRAINED=trained,
        **(shared | causal_tiles_of_queries(axis.tiles, plan).compilation),
    )
    if not trained:
        del key_sums  # before those over queries take as much memory
    by_row = [inverse, constant, to_total, to_mean]
    sums, to_state = _sums_of_queries(q, g, by_row, count, shape, plan, axis, query_scale, key_scale, unit)
    # Each query head gives a gradient to the key head it shares: added up afterwards, in float32.
    dtype = q.dtype if shape.groups == 1 else torch.float32
    grad_key, grad_value = (q.new_empty(*q.shape[:2], *x.shape[2:], dtype=dtype) for x in (k, v))
    if k.numel():
        causal_keys.key_backward[axis.programs(axis.first_key, heads)](
            *(q, k, v, flat(mask, k), query_scale, g, *by_row, *sums, _earlier(count, k)),
            *(grad_key, grad_value),
            *(*strides, *axis.from_tile(axis.first_key), key_scale, unit.eps, *map_arguments(plan)),
            **(shared | causal_tiles_of_keys(axis.tiles, plan).compilation),
        )
    to_keys = (over_groups(x, like) for x, like in ((grad_key, key), (grad_value, value)))
    grads = [grad_query.view(query.shape), *to_keys, to_scale.sum((0, 2)).view(query_scale.shape)]
    map_needs = ([to_total, to_mean, to_floored], [key_sums, sums]) if trained else ([], [])
    return [*grads, *to_state], *map_needs


def _sums_of_keys(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Sequence[Tensor],
    count: Tensor | None,
    shape: Shape,
    plan: Plan,
    axis: Axis,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """What each query row reads of the keys before its chunk, the state's among them."""
    before = lay_out(state, roots(shape, plan), shape, plan) if state else None
    return sums_along(k, v, mask, None, before, count, shape, plan, axis, None, key_scale, unit)[0]


def _sums_of_queries(
    q: Tensor,
    g: Tensor,
    by_row: Sequence[Tensor],
    count: Tensor | None,
    shape: Shape,
    plan: Plan,
    axis: Axis,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
) -> tuple[list[Tensor], list[Tensor]]:
    """What each key row reads of the queries behind its chunk; the gradients of a state's sums."""
    small = query_scale, key_scale, unit
    sums, parts = sums_along(q, g, None, by_row, None, count, shape, plan, axis, *small)
    if count is None:
        return sums, []
    # Every row sees the state, as a key behind which all queries lie.
    over_rows = [x.flatten(0, 1).unflatten(0, (shape.batch * shape.heads, -1)).sum(1) for x in parts]
    return sums, take_out(over_rows, roots(shape, plan), shape, plan)


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
    segments = _segment_sizes(axis, shape, plan)
    near, parts = _empty(x, near_sizes(axis, shape, plan), x.dtype), _empty(x, segments, torch.float32)
    causal_sums.accumulate[(parts_each * axis.segments * heads,)](
        *(x_rows, row_rows, flat(mask, x), x if query_scale is None else query_scale),
        *(*(by_row or (x, x, x, x)), *near, *parts, _earlier(count, x), *x_strides, *row_strides),
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
        *(*parts, *far, *(before or parts), _earlier(count, x)),
        *(first_key, *axis.cut, plan.num_features),
        HEADS=x.shape[1],
        HAS_STATE=count is not None,
        AFTER=after,
        ROWS=rows_each,
        BLOCK_D=shape.block_d,
        BLOCK_V=shape.block_v,
        BLOCK=axis.tiles.block,
    )
    return [*near, *far], parts


def _from_the_end(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The last row, and the strides by which a kernel goes back from there."""
    batch, head, row = x.stride()[:3]
    return x[..., -1:, :], (batch, head, -row)


def _earlier(count: Tensor | None, instead: Tensor) -> Tensor:
    """How many keys each state has seen, ``(B,)``; without states some pointer that no kernel reads."""
    return instead if count is None else count.flatten().contiguous()


def keys_seen(mask: Tensor | None, queries: int) -> Tensor | None:
    """How many keys each position sees, ``(B, N)``; without a mask the kernels know.

    It is an input of the operators: a compiler forms it once for all layers and their backward passes.
    """
    if mask is None:
        return None
    keys = mask.flatten(1)
    return F.pad(keys, (max(0, queries - keys.shape[1]), 0)).cumsum(1, dtype=torch.int32)


def _seen(seen: Tensor | None, mask: Tensor | None, instead: Tensor) -> Tensor:
    if (seen is None) != (mask is None):
        raise ValueError("a mask comes with what `keys_seen` makes of it")
    return instead if seen is None else seen


def row_counts(seen: Tensor | None, axis: Axis, like: Tensor) -> Tensor:
    """How many keys each query sees, ``(B, 1, n)``."""
    if seen is not None:
        return seen[:, None, -axis.queries :]
    last = torch.arange(axis.queries, device=like.device) + (axis.first_query - axis.first_key)
    return (last + 1).clamp(min=0).view(1, 1, -1)


def over_groups(grad: Tensor, like: Tensor) -> Tensor:
    """``(B, H·G, n, c) -> (B, H, 1, n, c)``."""
    batch, heads = like.shape[:2]
    if grad.shape[1] == heads:
        return grad.view(like.shape)
    groups = grad.shape[1] // heads
    return grad.view(batch, heads, groups, *like.shape[3:]).sum(2, keepdim=True).to(like.dtype)
