"""What a method draws once and keeps: the same numbers on every device."""

from collections.abc import Callable

import torch
from torch import Tensor

from schoenbat.options import check_seed


def drawn(
    draw: Callable[..., Tensor], *shape: int, seed: int, precision: torch.dtype | None = None
) -> Tensor:
    """What `torch.rand` or `torch.randn` gives for a seed, on the default device and in the default dtype.

    Drawn on the CPU, in the dtype `precision` (None: the default one): a seed means the same everywhere.

    Example:
        >>> drawn(torch.rand, 2, 3, seed=0).shape
        torch.Size([2, 3])
    """
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    return torch.empty(shape).copy_(draw(shape, generator=generator, dtype=precision, device="cpu"))
