"""Exact near, linear far as a custom operator of torch.library: what holds for `library` holds here."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops.operators import direct_operator
from schoenbat.ops.triton import launch_decode, launch_window
from schoenbat.ops.triton.call import Unit
from schoenbat.ops.triton.launch_window import Call, Near
from schoenbat.ops.triton.library.fakes import empty_gradients
from schoenbat.ops.triton.library.gradients import or_zeros
from schoenbat.ops.triton.plan import NUM_TENSORS, Plan


@direct_operator("triton_attend_window")
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far: Sequence[Tensor],
    mask: Tensor | None,
    plan: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    log_weight: Tensor,
    flags: Sequence[int],
    key_scale: float,
    width: int,
    is_causal: bool,
) -> list[Tensor]:
    small = Plan.of(plan, flags), coefficients, query_scale, log_weight, key_scale, Near(width, is_causal)
    return launch_window.attend(query, key, value, far, mask, *small)


@attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, far: Any, mask: Any, plan: Any, coefficients: Any, scale: Any,
    log_weight: Any, flags: Any, key_scale: float, width: int, is_causal: bool,
) -> list[Tensor]:  # fmt: skip
    call = Call.of(query, value, Plan.of(plan, flags), Near(0, is_causal))  # no size depends on the width
    row_size = call.shape.batch, call.shape.heads * call.shape.groups, query.shape[-2]
    sums, *others = launch_window.sizes(call, call.shape.batch * call.shape.heads)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    by_row = [query.new_empty(row_size, dtype=torch.float32) for _ in range(4)]
    return [out, *by_row, query.new_empty(sums), *(query.new_empty(x, dtype=torch.float32) for x in others)]


@direct_operator("triton_attend_window_backward")
def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    far: Sequence[Tensor],
    mask: Tensor | None,
    saved: Sequence[Tensor],
    plan: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    log_weight: Tensor,
    flags: Sequence[int],
    key_scale: float,
    width: int,
    is_causal: bool,
) -> list[Tensor]:
    small = Plan.of(plan, flags), coefficients, query_scale, log_weight, key_scale, Near(width, is_causal)
    return launch_window.attend_backward(grad, query, key, value, far, mask, saved, *small)


@attend_backward.register_fake
def _(
    grad: Any, query: Tensor, key: Tensor, value: Tensor, far: Sequence[Tensor], mask: Any, saved: Any,
    plan: Any, coefficients: Any, query_scale: Tensor, log_weight: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    return empty_gradients(query, key, value, query_scale, log_weight, *far)


def _context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, far, mask, plan, coefficients, query_scale, log_weight, *ctx.small = inputs
    ctx.num_far = len(far)
    rows = query, key, value, mask, coefficients, query_scale, log_weight
    ctx.save_for_backward(*rows, *far, *plan, *output)
    ctx.set_materialize_grads(False)  # only the output has a gradient: no zeros for sums


def _gradient(ctx: Any, grad: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, mask, coefficients, query_scale, log_weight, *rest = ctx.saved_tensors
    far, rest = rest[: ctx.num_far], rest[ctx.num_far :]
    plan, saved = rest[:NUM_TENSORS], rest[NUM_TENSORS:]
    to_output = or_zeros(grad[0], query, value.shape[-1])
    to_query, to_key, to_value, to_scale, to_weight, *to_far = attend_backward(
        *(to_output, query, key, value, far, mask, saved, plan, coefficients, query_scale, log_weight),
        *ctx.small,
    )
    to_rows = to_query, to_key, to_value, to_far, None, [None] * NUM_TENSORS, None
    return *to_rows, to_scale, to_weight, None, None, None, None


attend.register_autograd(_gradient, setup_context=_context)


@direct_operator("triton_step_window")
def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    far: Sequence[Tensor],
    near: Sequence[Tensor],
    count: Tensor,
    sums: Sequence[Tensor],
    plan: Sequence[Tensor],
    coefficients: Tensor,
    scale: Tensor,
    far_weight: Tensor,
    flags: Sequence[int],
    key_scale: float,
    unit: int,
    eps: float,
) -> list[Tensor]:
    """One decoding step; it has no derivative."""
    small = Plan.of(plan, flags), coefficients, scale, far_weight, key_scale, Unit(unit, eps)
    return launch_decode.step_with_window(query, key, value, mask, far, near, count, sums, *small)


@step.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, far: Any, near: Sequence[Tensor], count: Tensor,
    sums: Sequence[Tensor], *rest: Any,
) -> list[Tensor]:  # fmt: skip
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    after = [x.new_empty(x.shape) for x in (*sums, count)]
    return [out, *launch_decode.empty_window(key, value, near), *after]
