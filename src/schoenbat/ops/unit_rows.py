"""Rows of norm 1, for which feature maps are planned."""

from typing import NamedTuple

import torch
from torch import Tensor


class UnitRows(NamedTuple):
    """``u / ‖u‖`` with u = x, or x less the mean of its row; norms are taken as at least √(d·ε).

    Computed in float32 at least; a row of zeros (or constants, if centred) gives zeros.
    """

    centred: bool
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.centred:
            rows = rows - rows.mean(-1, keepdim=True)
        square = rows.square().sum(-1, keepdim=True)
        return (rows * square.clamp(min=x.shape[-1] * self.eps).rsqrt()).to(x.dtype)

    @property
    def code(self) -> int:
        """As kernels know it; 0 is for rows that stay as they are."""
        return 2 if self.centred else 1
