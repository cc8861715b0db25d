"""The fused kernels as custom operators of torch.library.

A map travels as its plan, a list of tensors, and a list of ints; gradients do not go through these. A map
that is trained comes along as `plan.trained_map` gives it, too: these tensors and the coefficients get some.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops.operators import direct_operator
from schoenbat.ops.triton import (
    launch,
    launch_causal,
    launch_decode,
    launch_hopper,
    launch_map,
    launch_state,
)
from schoenbat.ops.triton.call import Shape, Unit, as_rows, summary_shapes
from schoenbat.ops.triton.hopper_calls import goes_in_one_pass
from schoenbat.ops.triton.plan import Plan
from schoenbat.ops.triton.state import empty_state


@direct_operator("triton_attend")
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: Sequence[Tensor],
    trained: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    flags: Sequence[int],
    key_scale: float,
    unit: int,
    eps: float,
) -> list[Tensor]:
    small = Plan.of(plan, flags), coefficients, query_scale, key_scale, Unit(unit, eps)
    return launch.attend(query, key, value, mask, *small)


@attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, plan: Any, trained: Any, coefficients: Any,
    scale: Any, flags: Any, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    return _output_and_summary(query, value, Plan.of(plan, flags))


def _output_and_summary(query: Tensor, value: Tensor, plan: Plan) -> list[Tensor]:
    shapes = summary_shapes(Shape.of(query, value), plan)
    sums, *others = ((query.shape[0] * query.shape[1], *shape) for shape in shapes)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return [out, query.new_empty(sums), *(query.new_empty(s, dtype=torch.float32) for s in others)]


@direct_operator("triton_attend_backward")
def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    summary: Sequence[Tensor],
    plan: Sequence[Tensor],
    trained: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    flags: Sequence[int],
    key_scale: float,
    unit: int,
    eps: float,
) -> list[Tensor]:
    inputs, laid_out = (grad, query, key, value, mask, summary), Plan.of(plan, flags)
    small = coefficients, query_scale, key_scale, Unit(unit, eps)
    grads, by_row, to_summary = launch.attend_backward(*inputs, laid_out, *small, bool(trained))
    if trained:
        grads += launch_map.bidirectional(*inputs, by_row, to_summary, laid_out, trained, *small)
    return grads


@attend_backward.register_fake
def _(
    grad: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, summary: Any, plan: Any,
    trained: Sequence[Tensor], coefficients: Tensor, query_scale: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    return _empty_gradients(query, key, value, query_scale, *_trained(trained, coefficients))


def _empty_gradients(*tensors: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


def _trained(trained: Sequence[Tensor], coefficients: Tensor) -> list[Tensor]:
    """What of a trained map gets gradients."""
    return [*trained[:4], coefficients] if trained else []


def _to_trained(to_map: Sequence[Tensor]) -> tuple[list[Any], Tensor | None]:
    """The gradients of `trained` and of the coefficients, as autograd wants them."""
    return ([*to_map[:4], None, None, None], to_map[4]) if to_map else ([], None)


def or_zeros(grad: Tensor | None, query: Tensor, columns: int) -> Tensor:
    """The gradient of an output, which nobody may have given."""
    return query.new_zeros(*query.shape[:-1], columns) if grad is None else grad


def _context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, mask, plan, trained, coefficients, query_scale, *ctx.small = inputs
    ctx.save_for_backward(query, key, value, mask, coefficients, query_scale, *output[1:], *plan, *trained)
    ctx.set_materialize_grads(False)  # only the output has a gradient: no zeros for sums


def _gradient(ctx: Any, grad: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, mask, coefficients, query_scale, *rest = ctx.saved_tensors
    to_output = or_zeros(grad[0], query, value.shape[-1])
    to_query, to_key, to_value, to_scale, *to_map = attend_backward(
        *(to_output, query, key, value, mask, rest[:4], rest[4:9], rest[9:], coefficients, query_scale),
        *ctx.small,
    )
    to_trained, to_coefficients = _to_trained(to_map)
    to_rows = to_query, to_key, to_value, None
    return *to_rows, [None] * 5, to_trained, to_coefficients, to_scale, None, None, None, None


attend.register_autograd(_gradient, setup_context=_context)


@direct_operator("triton_summarize")
def summarize(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    plan: Sequence[Tensor],
    flags: Sequence[int],
    key_scale: float,
    unit: int,
    eps: float,
) -> list[Tensor]:
    """The sums of a state, of these keys and values alone."""
    small = Plan.of(plan, flags), key_scale, Unit(unit, eps)
    return launch_state.summarize(key, value, mask, *small)


@summarize.register_fake
def _(key: Tensor, value: Tensor, mask: Any, plan: Any, flags: Any, *rest: Any) -> list[Tensor]:
    return empty_state(key, value, Plan.of(plan, flags))


@direct_operator("triton_summarize_backward")
def summarize_backward(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    to_sums: Sequence[Tensor],
    value_sum: Tensor,
    plan: Sequence[Tensor],
    flags: Sequence[int],
    key_scale: float,
    unit: int,
    eps: float,
) -> list[Tensor]:
    small = Plan.of(plan, flags), key_scale, Unit(unit, eps)
    return launch_state.summarize_backward(key, value, mask, to_sums, value_sum, *small)


@summarize_backward.register_fake
def _(key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (key, value)]


def _summarize_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    key, value, mask, plan, *ctx.small = inputs
    ctx.save_for_backward(key, value, mask, output[3], *plan)


def _summarize_gradient(ctx: Any, grad: list[Tensor]) -> tuple[Any, ...]:
    key, value, mask, value_sum, *plan = ctx.saved_tensors
    to_key, to_value = summarize_backward(key, value, mask, grad, value_sum, plan, *ctx.small)
    return to_key, to_value, None, [None] * 5, None, None, None, None


summarize.register_autograd(_summarize_gradient, setup_context=_summarize_context)


@direct_operator("triton_read")
def read(
    query: Tensor,
    sums: Sequence[Tensor],
    count: Tensor,
    plan: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    flags: Sequence[int],
) -> list[Tensor]:
    """Attention to everything in a state; also what the backward pass starts from."""
    return launch_state.read(query, sums, count, Plan.of(plan, flags), coefficients, query_scale)


@read.register_fake
def _(
    query: Tensor, sums: Sequence[Tensor], count: Any, plan: Any, coefficients: Any, scale: Any, flags: Any
) -> list[Tensor]:
    return _output_and_summary(query, sums[3], Plan.of(plan, flags))


@direct_operator("triton_read_backward")
def read_backward(
    grad: Tensor,
    query: Tensor,
    summary: Sequence[Tensor],
    count: Tensor,
    plan: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    flags: Sequence[int],
) -> list[Tensor]:
    small = Plan.of(plan, flags), coefficients, query_scale
    return launch_state.read_backward(grad, query, summary, count, *small)


@read_backward.register_fake
def _(
    grad: Tensor, query: Tensor, summary: Any, count: Any, plan: Any, coefficients: Any, query_scale: Tensor,
    flags: Any,
) -> list[Tensor]:  # fmt: skip
    to_sums = empty_state(query, grad, Plan.of(plan, flags))
    return [query.new_empty(query.shape), query_scale.new_empty(query_scale.shape), *to_sums]


def _read_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, _, count, plan, coefficients, query_scale, ctx.flags = inputs
    ctx.save_for_backward(query, count, coefficients, query_scale, *output[1:], *plan)


def _read_gradient(ctx: Any, grad: list[Tensor]) -> tuple[Any, ...]:
    query, count, coefficients, query_scale, *rest = ctx.saved_tensors
    to_query, to_scale, *to_sums = read_backward(
        grad[0], query, rest[:4], count, rest[4:], coefficients, query_scale, ctx.flags
    )
    return to_query, to_sums, None, [None] * 5, None, to_scale, None


read.register_autograd(_read_gradient, setup_context=_read_context)


@direct_operator("triton_attend_causal")
def attend_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    state: Sequence[Tensor],
    count: Tensor | None,
    plan: Sequence[Tensor],
    trained: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    flags: Sequence[int],
    key_scale: float,
    unit: int,
    eps: float,
) -> list[Tensor]:
    """A map that is trained goes without a state."""
    small = Plan.of(plan, flags), coefficients, query_scale, key_scale, Unit(unit, eps)
    return launch_causal.attend(query, key, value, mask, seen, state, count, *small)


@attend_causal.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, seen: Any, state: Any, count: Any, plan: Any,
    trained: Any, coefficients: Any, scale: Any, flags: Any, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    batch, heads, groups, length, _ = query.shape
    by_row = [query.new_empty(batch, heads * groups, length, dtype=torch.float32) for _ in range(3)]
    sums = query.new_empty(0, dtype=torch.float32)
    laid_out, shape, (q, k) = Plan.of(plan, flags), Shape.of(query, value), map(as_rows, (query, key))
    if count is None and q.numel() and k.numel() and goes_in_one_pass(shape, laid_out, q, k):
        sums = launch_hopper.empty_sums(q, k, shape, laid_out)
    return [query.new_empty(*query.shape[:-1], value.shape[-1]), *by_row, sums]


@direct_operator("triton_attend_causal_backward")
def attend_causal_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    state: Sequence[Tensor],
    count: Tensor | None,
    saved: Sequence[Tensor],
    plan: Sequence[Tensor],
    trained: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    flags: Sequence[int],
    key_scale: float,
    unit: int,
    eps: float,
) -> list[Tensor]:
    inputs, laid_out = (grad, query, key, value, mask, seen), Plan.of(plan, flags)
    small = coefficients, query_scale, key_scale, Unit(unit, eps)
    grads, by_row, sums = launch_causal.attend_backward(
        *inputs, state, count, saved, laid_out, *small, bool(trained)
    )
    if trained:
        grads += launch_map.causal(*inputs, saved, by_row, sums, laid_out, trained, *small)
    return grads


@attend_causal_backward.register_fake
def _(
    grad: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, seen: Any, state: Any,
    count: Tensor | None, saved: Any, plan: Any, trained: Sequence[Tensor], coefficients: Tensor,
    query_scale: Tensor, flags: Any, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    to_state = [] if count is None else empty_state(query, value, Plan.of(plan, flags))
    to_rows = _empty_gradients(query, key, value, query_scale)
    return [*to_rows, *to_state, *_empty_gradients(*_trained(trained, coefficients))]


def _causal_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, mask, seen, state, count, plan, trained, coefficients, query_scale, *ctx.small = inputs
    small = coefficients, query_scale, *plan
    if trained:  # other kernels form its gradients, and sums of their own
        output = [*output[:4], output[4].new_empty(0)]
    ctx.save_for_backward(query, key, value, mask, seen, count, *small, *output, *state, *trained)
    ctx.set_materialize_grads(False)


def _causal_gradient(ctx: Any, grad: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, mask, seen, count, coefficients, query_scale, *rest = ctx.saved_tensors
    plan, outputs, rest = rest[:5], rest[5:10], rest[10:]
    state, trained = ([], rest) if count is None else (rest, [])
    to_output = or_zeros(grad[0], query, value.shape[-1])
    to_query, to_key, to_value, to_scale, *more = attend_causal_backward(
        *(to_output, query, key, value, mask, seen, state, count, outputs, plan, trained),
        *(coefficients, query_scale, *ctx.small),
    )
    to_state, to_map = ([], more) if count is None else (more, [])
    to_trained, to_coefficients = _to_trained(to_map)
    to_rows = to_query, to_key, to_value, None, None, to_state, None
    return *to_rows, [None] * 5, to_trained, to_coefficients, to_scale, None, None, None, None


attend_causal.register_autograd(_causal_gradient, setup_context=_causal_context)


@direct_operator("triton_step")
def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    count: Tensor,
    sums: Sequence[Tensor],
    plan: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    flags: Sequence[int],
    key_scale: float,
    unit: int,
    eps: float,
) -> list[Tensor]:
    """One decoding step; it has no derivative."""
    small = Plan.of(plan, flags), coefficients, query_scale, key_scale, Unit(unit, eps)
    return launch_decode.step(query, key, value, mask, count, sums, *small)


@step.register_fake
def _(query: Tensor, key: Any, value: Tensor, mask: Any, count: Any, sums: Any, *rest: Any) -> list[Tensor]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return [out, *(x.new_empty(x.shape) for x in sums)]
