"""Rows of norm 1, for which feature maps are planned."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.keeping import is_concrete, is_transformed
from schoenbat.ops.spans import in_chunks
from schoenbat.precision import at_least_float32


class UnitRows(NamedTuple):
    """``u / ‖u‖`` with u = x, or x less the mean of its row; norms are taken as at least √(d·ε).

    Computed in float32 at least; a row of zeros (or constants, if centred) gives zeros.
    """

    centred: bool
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() > 1 and is_concrete(x) and not is_transformed():
            unit: Tensor = _Chunks.apply(x, self)
            return unit
        return self.of_all(x)[0].to(x.dtype)

    def of_keys(self, key: Tensor, mask: Tensor | None) -> Tensor:
        """The same of keys; one that takes no part is taken as zero, lest a NaN in it reach its gradient."""
        return self(key if mask is None else torch.where(mask, key, 0.0))

    def of_all(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unit rows by plain operators, in float32 at least; and what u was multiplied by, ``(..., 1)``."""
        rows = x.to(at_least_float32(x.dtype))
        if self.centred:
            rows = _centred(_centred(rows))
        square, longest = rows.square().sum(-1, keepdim=True), None
        if is_concrete(square) and square.device.type == "cpu" and square.isinf().any():
            rows, longest = _shortened(rows, square)
            square = rows.square().sum(-1, keepdim=True)
        factor = square.clamp(min=x.shape[-1] * self.eps).rsqrt()
        return rows * factor, factor if longest is None else factor / longest

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of x from that of its unit rows."""
        unit, factor = self.of_all(x)
        grad = grad.to(unit.dtype)
        along = (grad * unit).sum(-1, keepdim=True)
        # Rows shorter than the least norm were multiplied by a constant.
        most = torch.full_like(factor[..., :1, :], x.shape[-1] * self.eps).rsqrt()
        to_rows = torch.addcmul(grad, unit, torch.where(factor < most, along, 0.0), value=-1) * factor
        return _centred(to_rows) if self.centred else to_rows

    @property
    def code(self) -> int:
        """As kernels know it; 0 is for rows that stay as they are."""
        return 2 if self.centred else 1


class _Chunks(torch.autograd.Function):
    """The same, a cache-sized chunk of rows at a time, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit_rows: UnitRows) -> Tensor:
        ctx.save_for_backward(x)
        ctx.unit_rows = unit_rows
        return in_chunks(lambda rows: unit_rows.of_all(rows)[0], x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        # Plain operators on all rows have second derivatives, and take gradients that are batched.
        if torch.is_grad_enabled() or not is_concrete(grad):
            return ctx.unit_rows.backward(x, grad).to(x.dtype), None
        return in_chunks(ctx.unit_rows.backward, x, grad), None


def _centred(rows: Tensor) -> Tensor:
    """Less their means. Of a row of constants that leaves what a mean was rounded by; done again, nothing."""
    return rows - rows.mean(-1, keepdim=True)


def _shortened(rows: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose squares do not fit, shortened before they are squared, and by how much.

    Where looking would synchronise (on a GPU) such rows, longer than 1e19 in float32, become zeros instead.
    """
    longest = rows.detach().abs().amax(-1, keepdim=True).clamp(min=1)
    longest = torch.where(square.isinf(), longest, 1.0)
    return rows / longest, longest
