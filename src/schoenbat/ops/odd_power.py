"""The power that post-SBN takes of outputs, ``γ a (a² + ε²)^((|β| − 1) / 2)``: specification and fast paths.

Rows are ``(..., H, n, d)``; γ and β ``(H, d)``.
"""

from typing import Any

import torch
from torch import Tensor

from schoenbat.ops import fused
from schoenbat.ops.keeping import is_concrete
from schoenbat.ops.operators import as_operators
from schoenbat.ops.spans import in_chunks, spans
from schoenbat.precision import at_least_float32


def odd_power(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    """Computed in float32 at least. Compilers and transforms see PyTorch's own operators."""
    if is_concrete(x) and as_operators():
        return _OddPower.apply(x, gamma, beta, epsilon)
    return specification(x, gamma, beta, epsilon)


def specification(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    """The formula in plain operators."""
    a, size = _sizes(x, epsilon)
    return (gamma.to(a.dtype)[:, None] * a * (size.log() * _exponent(beta, a)).exp()).to(x.dtype)


def _sizes(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """a in float32 at least, and √(a² + ε²)."""
    a = x.to(at_least_float32(x.dtype))
    if torch.onnx.is_in_onnx_export():  # which knows no hypot
        size = (a.square() + epsilon**2).sqrt()
    else:
        size = torch.hypot(a, a.new_full((), epsilon))  # whose square may not fit
    # The logarithm of infinity, times an exponent of 0, would not be a number.
    return a, size.clamp(max=torch.finfo(a.dtype).max)


def _exponent(beta: Tensor, a: Tensor) -> Tensor:
    """Of sizes. Powers go by logarithms: `pow` does more, for numbers that no size is, and takes longer."""
    return beta.to(a.dtype).abs()[:, None] - 1


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and fused.device_obstacle(x) is None


class _OddPower(torch.autograd.Function):
    """The same by kernels, or in place; gradients start from x alone: what lies between is larger."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, gamma, beta)
        ctx.epsilon = epsilon
        if _has_kernels(x):
            from schoenbat.ops.triton import launch_odd_power

            with torch.cuda.device_of(x):
                return launch_odd_power.forward(x, gamma, beta, epsilon)
        return in_chunks(lambda rows: _power(rows, gamma, beta, epsilon), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = *ctx.saved_tensors, ctx.epsilon
        # Plain operators on all rows have second derivatives, and take gradients that are batched.
        if torch.is_grad_enabled() or not is_concrete(grad):
            grads = _gradients(grad, *inputs)
        elif _has_kernels(grad):
            from schoenbat.ops.triton import launch_odd_power

            with torch.cuda.device_of(grad):
                grads = launch_odd_power.backward(grad, *inputs)
        else:
            grads = _gradients_in_chunks(grad, *inputs)
        return *(to_x.to(x.dtype) for to_x, x in zip(grads, inputs[:3], strict=True)), None


def _power(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    """The specification, in place."""
    a, size = _sizes(x, epsilon)
    power = size.log_().mul_(_exponent(beta, a)).exp_()
    return power.mul_(a).mul_(gamma.to(a.dtype)[:, None])


def _gradients_in_chunks(
    grad: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `_gradients`."""
    dtype = at_least_float32(x.dtype)
    to_x, to_gamma, to_beta = torch.empty_like(x), *(torch.zeros_like(p, dtype=dtype) for p in (gamma, beta))
    for span in spans(x):
        to_x[..., span, :], *more = _gradients(grad[..., span, :], x[..., span, :], gamma, beta, epsilon)
        to_gamma += more[0]
        to_beta += more[1]
    return to_x, to_gamma, to_beta


def _gradients(
    grad: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, γ and β, in float32 at least."""
    a, size = _sizes(x, epsilon)
    log, exponent = size.log(), _exponent(beta, a)
    g = grad.to(a.dtype) * (log * exponent).exp()
    by_row = g * a
    rows = tuple(d for d in range(x.dim()) if d not in (x.dim() - 3, x.dim() - 1))
    to_gamma, to_beta = by_row.sum(rows), (by_row * log).sum(rows) * gamma * beta.sign()
    to_x = g * gamma.to(a.dtype)[:, None] * (1 + exponent * (a / size).square())
    return to_x, to_gamma, to_beta
