"""Sums of a state: forming, reading, going on from them. What holds for `library` holds here."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from schoenbat.ops.operators import direct_operator
from schoenbat.ops.triton import launch_decode, launch_state
from schoenbat.ops.triton.call import Unit
from schoenbat.ops.triton.library.fakes import empty_gradients, output_and_summary
from schoenbat.ops.triton.plan import NUM_TENSORS, Plan
from schoenbat.ops.triton.state import empty_state


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
    return empty_gradients(key, value)


def _summarize_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    key, value, mask, plan, *ctx.small = inputs
    ctx.save_for_backward(key, value, mask, output[3], *plan)


def _summarize_gradient(ctx: Any, grad: list[Tensor]) -> tuple[Any, ...]:
    key, value, mask, value_sum, *plan = ctx.saved_tensors
    to_key, to_value = summarize_backward(key, value, mask, grad, value_sum, plan, *ctx.small)
    return to_key, to_value, None, [None] * NUM_TENSORS, None, None, None, None


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
    return output_and_summary(query, sums[3], Plan.of(plan, flags))


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
    return to_query, to_sums, None, [None] * NUM_TENSORS, None, to_scale, None


read.register_autograd(_read_gradient, setup_context=_read_context)


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
