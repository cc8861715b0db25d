"""Launch the kernels of causal attention; what holds for `launch` holds here."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.triton import launch_causal_hopper
from schoenbat.ops.triton.axis import Axis
from schoenbat.ops.triton.call import (
    Shape,
    Unit,
    as_rows,
    cdiv,
    earlier,
    flat,
    map_arguments,
    over_groups,
    per_map,
)
from schoenbat.ops.triton.hopper_calls import goes_in_one_pass
from schoenbat.ops.triton.kernels import causal, causal_keys
from schoenbat.ops.triton.launch_running_sums import sums_along
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.programs import split
from schoenbat.ops.triton.state import empty_state, lay_out, roots, take_out
from schoenbat.ops.triton.tiles import (
    Tiles,
    causal_tiles_of_keys,
    causal_tiles_of_queries,
    causal_tiles_of_read,
    is_of_one_group,
)

# Of outputs, to a program: more gain nothing, and leave multiprocessors without work where heads are many.
_MOST_TILES = 8


class Call(NamedTuple):
    """How a sequence is cut, and what all kernels take."""

    axis: Axis
    shape: Shape
    plan: Plan
    mask: Tensor | None
    seen: Tensor | None  # see `attend`
    state: Sequence[Tensor]
    state_count: Tensor | None
    query_scale: Tensor
    key_scale: float
    unit: Unit

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        return {
            "HEADS": self.shape.heads * self.shape.groups,
            "GROUPS": self.shape.groups,
            "HAS_MASK": self.mask is not None,
            "HAS_STATE": self.state_count is not None,
            "HAS_FAR": self.axis.has_far or self.state_count is not None,
            "UNIT": self.unit.code,
            "CHUNK": self.axis.chunk,
            **self.shape.constants(self.plan, tiles),
        }


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
    if (seen is None) != (mask is None):
        raise ValueError("a mask comes with what `keys_seen` makes of it")
    if count is None and q.numel() and k.numel() and goes_in_one_pass(shape, plan, q, k):
        small = plan, coefficients, query_scale, key_scale, unit
        return launch_causal_hopper.attend(query, key, value, mask, seen, *small)
    axis = Axis.of(q.shape[-2], k.shape[-2], shape, plan)
    call = Call(axis, shape, plan, mask, seen, state, count, query_scale, key_scale, unit)
    sums = _sums_of_keys(k, v, call)
    out = query.new_empty(*query.shape[:-1], shape.value_dim)
    by_row = [q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(3)]
    if out.numel():
        _read(q, k, v, sums, coefficients, [out, *by_row], call)
    return [out, *by_row, q.new_empty(0, dtype=torch.float32)]


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Sequence[Tensor],
    coefficients: Tensor,
    outputs: Sequence[Tensor],
    call: Call,
) -> None:
    """Each query row's output and three values, into `outputs`."""
    axis, plan, heads = call.axis, call.plan, q.shape[0] * q.shape[1]
    several = is_of_one_group(axis.tiles, plan)
    programs, each = axis.programs(axis.first_query, 1)[0], 1
    if several:
        each = min(_MOST_TILES, split(programs, heads, axis.tiles)[1])
        programs = cdiv(programs, each)
    causal.read[(programs * heads,)](
        *(q, k, v, flat(call.mask, k), k if call.seen is None else call.seen, call.query_scale),
        *(per_map(coefficients, plan), *outputs, *sums, earlier(call.state_count, k)),
        *(*_strides(q, k, v), *axis.from_tile(axis.first_query)),
        *(each, call.key_scale, call.unit.eps, *map_arguments(plan)),
        SINGLE=several,
        **call.constants(causal_tiles_of_read(axis.tiles, plan)),
    )


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
    shape = Shape.of(query, value)
    q, k, v, g = as_rows(query), as_rows(key), as_rows(value), as_rows(grad.to(query.dtype))
    if not q.numel():
        to_state = [] if count is None else [x.zero_() for x in empty_state(query, value, plan)]
        return [*(torch.zeros_like(x) for x in (query, key, value, query_scale)), *to_state], [], []
    if count is None and not trained and k.numel() and goes_in_one_pass(shape, plan, q, k):
        inputs = grad, query, key, value, mask, seen, saved
        small = plan, coefficients, query_scale, key_scale, unit
        by_head = launch_causal_hopper.attend_backward(*inputs, *small)
        return _as_given(by_head, query, key, value, query_scale), [], []
    axis = Axis.of(q.shape[-2], k.shape[-2], shape, plan)
    call = Call(axis, shape, plan, mask, seen, state, count, query_scale, key_scale, unit)
    grad_query, to_scale, to_rows, key_sums = _query_backward(q, k, v, g, saved, coefficients, call, trained)
    by_row = [*saved[1:3], *to_rows[:2]]
    sums, to_state = _sums_of_queries(q, g, by_row, call)
    grad_key, grad_value = _key_backward(q, k, v, g, by_row, sums, call)
    grads = _as_given((grad_query, grad_key, grad_value, to_scale), query, key, value, query_scale)
    for_map = (to_rows, [key_sums, sums]) if trained else ([], [])
    return [*grads, *to_state], *for_map


def _as_given(
    by_head: Sequence[Tensor], query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor
) -> list[Tensor]:
    """Gradients of these, from those by query head, of the scale by program, too."""
    to_query, to_key, to_value, to_scale = by_head
    to_keys = over_groups(to_key, key), over_groups(to_value, value)
    return [to_query.view(query.shape), *to_keys, to_scale.sum((0, 2)).view(query_scale.shape)]


def _query_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    saved: Sequence[Tensor],
    coefficients: Tensor,
    call: Call,
    trained: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Gradients of queries, of the scale by program, and by row of total, mean logit and f.

    That of f is formed for a `trained` map alone. Then the sums over keys for such a map; else they go here,
    before those over queries take as much memory.
    """
    axis, sums = call.axis, _sums_of_keys(k, v, call)
    out, (inverse, constant, slope) = as_rows(saved[0]), saved[1:4]
    programs = axis.programs(axis.first_query, q.shape[0] * q.shape[1])
    grad_query = q.new_empty(q.shape)
    to_total, to_mean = (torch.empty_like(inverse) for _ in range(2))
    to_floored = torch.empty_like(inverse) if trained else inverse
    to_scale = inverse.new_empty(*q.shape[:2], axis.programs(axis.first_query, 1)[0])
    causal.query_backward[programs](
        *(q, k, v, flat(call.mask, k), k if call.seen is None else call.seen, call.query_scale),
        *(per_map(coefficients, call.plan), g, out, inverse, constant, slope, *sums),
        *(earlier(call.state_count, k), grad_query, to_total, to_mean, to_floored, to_scale),
        *(*_strides(q, k, v, g), *axis.from_tile(axis.first_query)),
        *(call.key_scale, call.unit.eps, *map_arguments(call.plan)),
        TRAINED=trained,
        **call.constants(causal_tiles_of_queries(axis.tiles, call.plan)),
    )
    return grad_query, to_scale, [to_total, to_mean, to_floored], sums if trained else []


def _key_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    by_row: Sequence[Tensor],
    sums: Sequence[Tensor],
    call: Call,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values by query head, from 1/f, the constant and two gradients `by_row`."""
    # Each query head gives a gradient to the key head it shares: added up afterwards, in float32.
    dtype = q.dtype if call.shape.groups == 1 else torch.float32
    grad_key, grad_value = (q.new_empty(*q.shape[:2], *x.shape[2:], dtype=dtype) for x in (k, v))
    axis, heads = call.axis, q.shape[0] * q.shape[1]
    if k.numel():
        causal_keys.key_backward[axis.programs(axis.first_key, heads)](
            *(q, k, v, flat(call.mask, k), call.query_scale, g, *by_row, *sums, earlier(call.state_count, k)),
            *(grad_key, grad_value, *_strides(q, k, v, g), *axis.from_tile(axis.first_key)),
            *(call.key_scale, call.unit.eps, *map_arguments(call.plan)),
            **call.constants(causal_tiles_of_keys(axis.tiles, call.plan)),
        )
    return grad_key, grad_value


def _strides(*rows: Tensor) -> list[int]:
    return [step for x in rows for step in x.stride()[:3]]


def _sums_of_keys(k: Tensor, v: Tensor, call: Call) -> list[Tensor]:
    """What each query row reads of the keys before its chunk, the state's among them."""
    shape, plan = call.shape, call.plan
    before = lay_out(call.state, roots(shape, plan), shape, plan) if call.state else None
    small = call.state_count, shape, plan, call.axis, None, call.key_scale, call.unit
    return sums_along(k, v, call.mask, None, before, *small)[0]


def _sums_of_queries(
    q: Tensor, g: Tensor, by_row: Sequence[Tensor], call: Call
) -> tuple[list[Tensor], list[Tensor]]:
    """What each key row reads of the queries behind its chunk; the gradients of a state's sums."""
    shape, plan = call.shape, call.plan
    small = call.state_count, shape, plan, call.axis, call.query_scale, call.key_scale, call.unit
    sums, parts = sums_along(q, g, None, by_row, None, *small)
    if call.state_count is None:
        return sums, []
    # Every row sees the state, as a key behind which all queries lie.
    over_rows = [x.flatten(0, 1).unflatten(0, (shape.batch * shape.heads, -1)).sum(1) for x in parts]
    return sums, take_out(over_rows, roots(shape, plan), shape, plan)
