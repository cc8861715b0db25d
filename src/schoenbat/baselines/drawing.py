"""What a method draws once and keeps: the same numbers on every device and in every default dtype."""

from collections.abc import Callable

import torch
from torch import Tensor

from schoenbat.options import check_seed
from schoenbat.precision import at_least_float32


def drawn(
    draw: Callable[..., Tensor], *shape: int, seed: int, precision: torch.dtype = torch.float32
) -> Tensor:
    """What `torch.rand` or `torch.randn` gives for a seed, on the default device, in float32 at least.

    Drawn on the CPU, in the dtype `precision`: a seed means the same whatever the defaults are.

    Example:
        >>> drawn(torch.rand, 2, 3, seed=0).shape
        torch.Size([2, 3])
    """
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    kept = torch.empty(shape, dtype=at_least_float32(torch.get_default_dtype()))
    return kept.copy_(draw(shape, generator=generator, dtype=precision, device="cpu"))
