"""Rows of norm 1, for which feature maps are planned."""

from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.keeping import is_concrete
from schoenbat.precision import at_least_float32


class UnitRows(NamedTuple):
    """``u / ‖u‖`` with u = x, or x less the mean of its row; norms are taken as at least √(d·ε).

    Computed in float32 at least; a row of zeros (or constants, if centred) gives zeros.
    """

    centred: bool
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(at_least_float32(x.dtype))
        if self.centred:
            rows = _centred(_centred(rows))
        square = rows.square().sum(-1, keepdim=True)
        if is_concrete(square) and square.device.type == "cpu" and square.isinf().any():
            rows, square = _without_overflow(rows, square)
        return (rows * square.clamp(min=x.shape[-1] * self.eps).rsqrt()).to(x.dtype)

    def of_keys(self, key: Tensor, mask: Tensor | None) -> Tensor:
        """The same of keys; one that takes no part is taken as zero, lest a NaN in it reach its gradient."""
        return self(key if mask is None else torch.where(mask, key, 0.0))

    @property
    def code(self) -> int:
        """As kernels know it; 0 is for rows that stay as they are."""
        return 2 if self.centred else 1


def _centred(rows: Tensor) -> Tensor:
    """Less their means. Of a row of constants that leaves what a mean was rounded by; done again, nothing."""
    return rows - rows.mean(-1, keepdim=True)


def _without_overflow(rows: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose squares do not fit, shortened before they are squared: a unit row does not show it.

    Where looking would synchronise (on a GPU) such rows, longer than 1e19 in float32, become zeros instead.
    """
    shorter = rows / rows.detach().abs().amax(-1, keepdim=True).clamp(min=1)
    rows = torch.where(square.isinf(), shorter, rows)
    return rows, rows.square().sum(-1, keepdim=True)
