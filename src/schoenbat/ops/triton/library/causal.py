"""Causal attention: what holds for `library` holds here."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops.operators import direct_operator
from schoenbat.ops.triton import launch_causal, launch_causal_hopper, launch_map
from schoenbat.ops.triton.call import Shape, Unit, as_rows
from schoenbat.ops.triton.hopper_calls import goes_in_one_pass
from schoenbat.ops.triton.library.fakes import empty_gradients
from schoenbat.ops.triton.library.gradients import of_trained, or_zeros, what_is_trained
from schoenbat.ops.triton.plan import NUM_TENSORS, Plan
from schoenbat.ops.triton.state import empty_state

_NUM_OUTPUTS = 5  # of attend_causal


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
        sums = launch_causal_hopper.empty_sums(q, k, shape, laid_out)
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
    to_rows = empty_gradients(query, key, value, query_scale)
    return [*to_rows, *to_state, *empty_gradients(*what_is_trained(trained, coefficients))]


def _causal_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, mask, seen, state, count, plan, trained, coefficients, query_scale, *ctx.small = inputs
    small = coefficients, query_scale, *plan
    if trained:  # other kernels form its gradients, and sums of their own
        output = [*output[:4], output[4].new_empty(0)]
    ctx.save_for_backward(query, key, value, mask, seen, count, *small, *output, *state, *trained)
    ctx.set_materialize_grads(False)


def _causal_gradient(ctx: Any, grad: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, mask, seen, count, coefficients, query_scale, *rest = ctx.saved_tensors
    plan, rest = rest[:NUM_TENSORS], rest[NUM_TENSORS:]
    outputs, rest = rest[:_NUM_OUTPUTS], rest[_NUM_OUTPUTS:]
    state, trained = ([], rest) if count is None else (rest, [])
    to_output = or_zeros(grad[0], query, value.shape[-1])
    to_query, to_key, to_value, to_scale, *more = attend_causal_backward(
        *(to_output, query, key, value, mask, seen, state, count, outputs, plan, trained),
        *(coefficients, query_scale, *ctx.small),
    )
    to_state, to_map = ([], more) if count is None else (more, [])
    to_trained, to_coefficients = of_trained(to_map)
    to_rows = to_query, to_key, to_value, None, None, to_state, None
    return *to_rows, [None] * NUM_TENSORS, to_trained, to_coefficients, to_scale, None, None, None, None


attend_causal.register_autograd(_causal_gradient, setup_context=_causal_context)
