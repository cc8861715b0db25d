"""The eager functions as custom operators of torch.library.

As operators they are one node each in a compiled graph, keep nothing but their inputs for the backward pass,
and have hand-written gradients. Second derivatives are not implemented and raise.

A map travels as ``maps = [linear, quadratic, tail]`` and a list of ints, sums as a list of tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schoenbat.ops import eager, eager_causal
from schoenbat.ops.blocks import Blocks, Evaluator
from schoenbat.ops.eager import Summary
from schoenbat.ops.eager_causal import Inputs
from schoenbat.ops.operators import operator
from schoenbat.ops.sums import Sums
from schoenbat.precision import at_least_float32


def _empty_like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


@operator("eager_summarize")
def summarize(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    maps: Sequence[Tensor],
    layout: Sequence[int],
    key_scale: float,
) -> list[Tensor]:
    return list(eager.summarize(key, value, mask, Blocks.from_layout(maps, layout), key_scale))


@summarize.register_fake
def _(key: Tensor, value: Tensor, mask: Any, maps: Any, layout: Any, key_scale: float) -> list[Tensor]:
    features = sum(Blocks.from_layout(maps, layout).sizes)
    lead, dtype = (*key.shape[:2], 1), at_least_float32(key.dtype)
    shapes = (features, value.shape[-1]), (features, 1), (1, key.shape[-1]), (1, value.shape[-1])
    return [key.new_empty(*lead, *shape, dtype=dtype) for shape in shapes]


@operator("eager_summarize_backward")
def summarize_backward(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    grad: Sequence[Tensor],
    summary: Sequence[Tensor],
    maps: Sequence[Tensor],
    layout: Sequence[int],
    key_scale: float,
    train_map: bool,
) -> list[Tensor]:
    evaluator = Evaluator(Blocks.from_layout(maps, layout), train_map)
    to_key, to_value = eager.summarize_backward(
        Summary(*grad), Summary(*summary), key, value, mask, evaluator, key_scale
    )
    return [to_key, to_value, *evaluator.gradients]


@summarize_backward.register_fake
def _(key: Tensor, value: Tensor, mask: Any, grad: Any, summary: Any, maps: Any, *rest: Any) -> list[Tensor]:
    return _empty_like(key, value, *maps)


def _summarize_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    key, value, mask, maps, ctx.layout, ctx.key_scale = inputs
    ctx.save_for_backward(key, value, mask, *output, *maps)


def _summarize_gradient(ctx: Any, grad: list[Tensor]) -> tuple[Any, ...]:
    key, value, mask, *rest = ctx.saved_tensors
    to_key, to_value, *to_maps = summarize_backward(
        key, value, mask, grad, rest[:4], rest[4:], ctx.layout, ctx.key_scale, any(ctx.needs_input_grad[3])
    )
    return to_key, to_value, None, to_maps, None, None


summarize.register_autograd(_summarize_gradient, setup_context=_summarize_context)


@operator("eager_read")
def read(
    query: Tensor,
    summary: Sequence[Tensor],
    count: Tensor,
    maps: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    layout: Sequence[int],
) -> Tensor:
    blocks = Blocks.from_layout(maps, layout)
    out = query.new_empty(*query.shape[:-1], summary[0].shape[-1])
    value_mean = summary[3]
    chunks = eager.read(query, Summary(*summary), count, blocks, coefficients, query_scale)
    for span, numerator, denominator in chunks:
        torch.addcdiv(value_mean, numerator, denominator, out=out[..., span, :])
    return out


@read.register_fake
def _(
    query: Tensor, summary: Any, count: Any, maps: Any, coefficients: Any, scale: Any, layout: Any
) -> Tensor:
    return query.new_empty(*query.shape[:-1], summary[0].shape[-1])


@operator("eager_read_backward")
def read_backward(
    grad: Tensor,
    query: Tensor,
    summary: Sequence[Tensor],
    count: Tensor,
    maps: Sequence[Tensor],
    coefficients: Tensor,
    query_scale: Tensor,
    layout: Sequence[int],
    train_map: bool,
    train_scale: bool,
) -> list[Tensor]:
    evaluator = Evaluator(Blocks.from_layout(maps, layout), train_map)
    to_query, to_summary, to_coefficients, to_scale = eager.read_backward(
        grad, query, Summary(*summary), count, coefficients, query_scale, evaluator, train_scale
    )
    return [to_query, to_coefficients, to_scale, *to_summary, *evaluator.gradients]


@read_backward.register_fake
def _(
    grad: Any, query: Tensor, summary: Any, count: Any, maps: Any, coefficients: Any, scale: Any, *rest: Any
) -> list[Tensor]:
    return _empty_like(query, coefficients, scale, *summary, *maps)


def _read_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, summary, count, maps, coefficients, query_scale, ctx.layout = inputs
    ctx.save_for_backward(query, count, coefficients, query_scale, *summary, *maps)


def _read_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, count, coefficients, query_scale, *rest = ctx.saved_tensors
    to_query, to_coefficients, to_scale, *more = read_backward(
        grad,
        query,
        rest[:4],
        count,
        rest[4:],
        coefficients,
        query_scale,
        ctx.layout,
        any(ctx.needs_input_grad[3]) or ctx.needs_input_grad[4],
        ctx.needs_input_grad[5],
    )
    return to_query, more[:4], None, more[4:], to_coefficients, to_scale, None


read.register_autograd(_read_gradient, setup_context=_read_context)


@operator("eager_scan")
def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    count: Tensor,
    sums: Sequence[Tensor],
    maps: Sequence[Tensor],
    weight: Tensor,
    coefficients: Tensor,
    query_scale: Tensor,
    layout: Sequence[int],
    key_scale: float,
) -> list[Tensor]:
    blocks = Blocks.from_layout(maps, layout)
    inputs = Inputs(query, key, value, mask, count, blocks, weight, coefficients, query_scale, key_scale)
    out, after = eager_causal.scan(inputs, Sums(*sums))
    return [out, *after]


@scan.register_fake
def _(query: Tensor, key: Any, value: Tensor, mask: Any, count: Any, sums: Any, *rest: Any) -> list[Tensor]:
    return [query.new_empty(*query.shape[:-1], value.shape[-1]), *_empty_like(*sums)]


@operator("eager_scan_backward")
def scan_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    count: Tensor,
    grad: Sequence[Tensor],
    sums: Sequence[Tensor],
    maps: Sequence[Tensor],
    weight: Tensor,
    coefficients: Tensor,
    query_scale: Tensor,
    layout: Sequence[int],
    key_scale: float,
    train_map: bool,
) -> list[Tensor]:
    blocks = Blocks.from_layout(maps, layout)
    inputs = Inputs(query, key, value, mask, count, blocks, weight, coefficients, query_scale, key_scale)
    evaluator = Evaluator(blocks, train_map)
    to_query, to_key, to_value, small, to_sums = eager_causal.scan_backward(
        grad[0], Sums(*grad[1:]), inputs, Sums(*sums), evaluator
    )
    return [to_query, to_key, to_value, *small, *to_sums, *evaluator.gradients]


@scan_backward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    count: Any,
    grad: Any,
    sums: Any,
    maps: Any,
    weight: Tensor,
    coefficients: Tensor,
    query_scale: Tensor,
    *rest: Any,
) -> list[Tensor]:
    return _empty_like(query, key, value, weight, coefficients, query_scale, *sums, *maps)


def _scan_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, mask, count, sums, maps, weight, coefficients, scale, ctx.layout, ctx.key_scale = (
        inputs
    )
    ctx.save_for_backward(query, key, value, mask, count, weight, coefficients, scale, *sums, *maps)


def _scan_gradient(ctx: Any, grad: list[Tensor]) -> tuple[Any, ...]:
    query, key, value, mask, count, *small = ctx.saved_tensors
    sums, maps = small[3:7], small[7:]
    train_map = any(ctx.needs_input_grad[6]) or any(ctx.needs_input_grad[7:9])
    grads = scan_backward(
        query, key, value, mask, count, grad, sums, maps, *small[:3], ctx.layout, ctx.key_scale, train_map
    )
    return *grads[:3], None, None, grads[6:10], grads[10:], *grads[3:6], None, None


scan.register_autograd(_scan_gradient, setup_context=_scan_context)
