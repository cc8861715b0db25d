"""Bidirectional attention: what holds for `library` holds here."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from schoenbat.ops.operators import direct_operator
from schoenbat.ops.triton import launch, launch_map
from schoenbat.ops.triton.call import Unit
from schoenbat.ops.triton.library.fakes import empty_gradients, output_and_summary
from schoenbat.ops.triton.library.gradients import of_trained, or_zeros, what_is_trained
from schoenbat.ops.triton.plan import NUM_TENSORS, Plan


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
    return output_and_summary(query, value, Plan.of(plan, flags))


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
    return empty_gradients(query, key, value, query_scale, *what_is_trained(trained, coefficients))


def _context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, mask, plan, trained, coefficients, query_scale, *ctx.small = inputs
    ctx.save_for_backward(query, key, value, mask, coefficients, query_scale, *output[1:], *plan, *trained)
    ctx.set_materialize_grads(False)  # only the output has a gradient: no zeros for sums


def _gradient(ctx: Any, grad: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, mask, coefficients, query_scale, *rest = ctx.saved_tensors
    summary, plan, trained = rest[:4], rest[4:][:NUM_TENSORS], rest[4 + NUM_TENSORS :]
    to_output = or_zeros(grad[0], query, value.shape[-1])
    to_query, to_key, to_value, to_scale, *to_map = attend_backward(
        *(to_output, query, key, value, mask, summary, plan, trained, coefficients, query_scale),
        *ctx.small,
    )
    to_trained, to_coefficients = of_trained(to_map)
    to_rows = to_query, to_key, to_value, None
    return *to_rows, [None] * NUM_TENSORS, to_trained, to_coefficients, to_scale, None, None, None, None


attend.register_autograd(_gradient, setup_context=_context)
