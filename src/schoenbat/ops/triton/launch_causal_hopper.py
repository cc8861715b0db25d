"""Launch the kernels of causal attention in one pass, where a call is of the kind they are for."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.triton.call import Shape, Unit, as_rows, cdiv, mask_bytes, per_map
from schoenbat.ops.triton.hopper_calls import MOST_CAUSAL_TILES, is_aligned, is_narrow, widths
from schoenbat.ops.triton.plan import Plan

_BLOCK, _ROWS_OF_DEGREES = 64, 128
# About twice as many as there are multiprocessors: of two on one of them, one works while the other waits.
# Of wide heads and of many degrees a program has eight warps and a multiprocessor for itself.
_PROGRAMS = 264
# Every segment adds up the sums of those before it: more than a few are worth it where each has many tiles.
_FEW_SEGMENTS, _TILES_EACH = 8, 16
_MODULES = {32: "causal_narrow", 64: "causal", 128: "causal_wide"}
_OF_DEGREES = "causal_degrees"


class Segments(NamedTuple):
    """How queries and keys lie on the axis of positions, and how it is cut."""

    queries: int
    keys: int
    tiles_each: int
    number: int
    num_tiles: int

    @classmethod
    def of(cls, queries: int, keys: int, heads: int, shape: Shape, plan: Plan) -> "Segments":
        num_tiles, most = _tiles_and_segments(queries, keys, heads, shape, plan)
        each = cdiv(num_tiles, most)
        return cls(queries, keys, each, cdiv(num_tiles, each), num_tiles)

    @property
    def first_query(self) -> int:
        return max(0, self.keys - self.queries)

    @property
    def first_key(self) -> int:
        return max(0, self.queries - self.keys)

    @property
    def cut(self) -> tuple[int, int, int]:
        return self.tiles_each, self.number, self.num_tiles

    @property
    def whole(self) -> tuple[int, ...]:
        return self.queries, self.keys, self.first_query, self.first_key, *self.cut


class Kernels(NamedTuple):
    """Those for heads of one padded width, or for many degrees."""

    sum_keys: Any
    read: Any
    query_backward: Any
    sum_queries: Any
    key_backward: Any

    @staticmethod
    def of(shape: Shape, plan: Plan) -> "Kernels":
        return Kernels.named(_MODULES[shape.block_d] if plan.identity else _OF_DEGREES)

    @staticmethod
    @cache
    def named(module: str) -> "Kernels":
        """Imported where a call has kernels of this kind: there are GPUs and versions of Triton without."""
        name = f"schoenbat.ops.triton.hopper.{module}"
        outputs, queries, keys = (import_module(name + part) for part in ("", "_queries", "_keys"))
        of_keys = keys.sum_queries, keys.key_backward
        return Kernels(outputs.sum_keys, outputs.read, queries.query_backward, *of_keys)


def _is_alone(shape: Shape, plan: Plan) -> bool:
    """Whether a program has eight warps."""
    return shape.block_d > 64 or not plan.identity


def _sizes_of_sums(shape: Shape, plan: Plan) -> tuple[int, int]:
    """Of a segment, over keys and over queries: see the kernels."""
    if is_narrow(shape) or not plan.identity:
        size = 2 * plan.group * (shape.block_v + 1) + shape.block_d + shape.block_v
        return size, size
    size = (shape.block_d + plan.num_groups * plan.group) * (shape.block_v + 1) + shape.block_v
    return size, size + shape.block_d


def _tiles_and_segments(queries: int, keys: int, heads: int, shape: Shape, plan: Plan) -> tuple[int, int]:
    """How many tiles there are, and at most how many segments.

    Without a branch: to a compiler lengths may be symbols.
    """
    programs = _PROGRAMS // 2 if _is_alone(shape, plan) else _PROGRAMS
    rows = _BLOCK if plan.identity else _ROWS_OF_DEGREES
    num_tiles = torch.sym_max(1, cdiv(torch.sym_max(queries, keys), rows))
    most = torch.sym_max(_FEW_SEGMENTS, num_tiles // _TILES_EACH)
    return num_tiles, torch.sym_max(1, torch.sym_min(torch.sym_min(num_tiles, most), programs // heads))


def empty_sums(query: Tensor, key: Tensor, shape: Shape, plan: Plan) -> Tensor:
    """Room for the sums over keys of each segment but the last, by key head; rows are `as_rows` of a call.

    It is little, whatever the length: at most 9 MB where heads have up to 64 channels, else 18.
    """
    heads, key_heads = query.shape[0] * query.shape[1], key.shape[0] * key.shape[1]
    _, segments = _tiles_and_segments(query.shape[-2], key.shape[-2], heads, shape, plan)
    size = _sizes_of_sums(shape, plan)[0]
    # Never empty: a compiler would take that for another graph, and an exported one would refuse it.
    return key.new_empty(torch.sym_max(2, key_heads * (segments - 1) * size), dtype=torch.float32)


def constants(shape: Shape, plan: Plan, heads: int, unit: Unit) -> dict[str, Any]:
    """What kernels are compiled for."""
    own = {"GROUPS": shape.groups, "num_warps": 8 if _is_alone(shape, plan) else 4}
    if plan.identity:
        own["F"] = plan.num_groups * plan.group if _is_alone(shape, plan) else plan.group
    else:
        own["HELD"] = MOST_CAUSAL_TILES
    if is_narrow(shape):
        own["PAIRS"] = plan.num_groups
    return widths(shape, plan, heads, unit) | own


def _map(plan: Plan) -> tuple[Any, ...]:
    if plan.identity:
        return plan.tiles, plan.root_weight, plan.root_linear
    return plan.tiles, plan.root_weight, plan.degrees, plan.first, plan.tiles.shape[1]


def _aligned(x: Tensor) -> Tensor:
    """Rows as they are copied: contiguous ones may still begin anywhere."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _sum_keys(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sums: Tensor,
    shape: Shape,
    plan: Plan,
    axis: Segments,
    key_scale: float,
    unit: Unit,
) -> None:
    """The sums over each segment of keys, into `sums`."""
    heads = k.shape[0] * k.shape[1]
    if axis.number == 1:
        return
    shared = constants(shape, plan, k.shape[1], unit)
    del shared["GROUPS"]
    Kernels.of(shape, plan).sum_keys[((axis.number - 1) * heads,)](
        *(k, v, mask_bytes(mask), sums, *k.stride()[:3], *v.stride()[:3]),
        *(axis.keys, axis.first_key, axis.tiles_each, axis.number, key_scale, unit.eps, *_map(plan)),
        **shared,
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
) -> list[Tensor]:
    """As `launch_causal.attend`."""
    shape = Shape.of(query, value)
    q, k, v = (_aligned(as_rows(x)) for x in (query, key, value))
    heads = q.shape[0] * q.shape[1]
    axis = Segments.of(q.shape[-2], k.shape[-2], heads, shape, plan)
    out = query.new_empty(*query.shape[:-1], shape.value_dim)
    by_row = [q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(3)]
    sums = empty_sums(q, k, shape, plan)
    _sum_keys(k, v, mask, sums, shape, plan, axis, key_scale, unit)
    Kernels.of(shape, plan).read[(axis.number * heads,)](
        *(q, k, v, mask_bytes(mask), seen, query_scale, per_map(coefficients, plan), sums, out, *by_row),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *axis.whole, key_scale, unit.eps, *_map(plan)),
        **constants(shape, plan, q.shape[1], unit),
    )
    return [out, *by_row, sums]


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    saved: Sequence[Tensor],
    plan: Plan,
    coefficients: Tensor,
    query_scale: Tensor,
    key_scale: float,
    unit: Unit,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, of key and value by query head, and of the scale by segment."""
    shape, out, (inverse, constant, slope, sums) = Shape.of(query, value), as_rows(saved[0]), saved[1:]
    q, k, v, g = (_aligned(as_rows(x)) for x in (query, key, value, grad.to(query.dtype)))
    heads = q.shape[0] * q.shape[1]
    axis = Segments.of(q.shape[-2], k.shape[-2], heads, shape, plan)
    shared = constants(shape, plan, q.shape[1], unit)
    kernels = Kernels.of(shape, plan)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3]
    grad_query, to_total, to_mean = q.new_empty(q.shape), torch.empty_like(inverse), torch.empty_like(inverse)
    to_scale = inverse.new_empty(*q.shape[:2], axis.number)
    kernels.query_backward[(axis.number * heads,)](
        *(q, k, v, mask_bytes(mask), seen, query_scale, per_map(coefficients, plan), sums),
        *(g, out, inverse, constant, slope, grad_query, to_total, to_mean, to_scale),
        *(*strides, *axis.whole, key_scale, unit.eps, *_map(plan)),
        **shared,
    )
    by_row = inverse, constant, to_total, to_mean
    sums = plan.root_weight
    if axis.number > 1:
        sums = q.new_empty(heads, axis.number, _sizes_of_sums(shape, plan)[1], dtype=torch.float32)
        kernels.sum_queries[((axis.number - 1) * heads,)](
            *(q, query_scale, g, *by_row, sums, *q.stride()[:3], *g.stride()[:3]),
            *(axis.queries, axis.first_query, *axis.cut, unit.eps, *_map(plan)),
            **shared,
        )
    # Each query head gives a gradient to the key head it shares: added up afterwards, in float32.
    dtype = q.dtype if shape.groups == 1 else torch.float32
    grad_key, grad_value = (q.new_empty(*q.shape[:2], *x.shape[2:], dtype=dtype) for x in (k, v))
    kernels.key_backward[(axis.number * heads,)](
        *(q, k, v, mask_bytes(mask), query_scale, sums, g, *by_row, grad_key, grad_value),
        *(*strides, *axis.whole, key_scale, unit.eps, *_map(plan)),
        **shared,
    )
    return grad_query, grad_key, grad_value, to_scale
