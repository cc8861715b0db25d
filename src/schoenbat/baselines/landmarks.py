"""What the Nyström methods share: tokens by their place among the real ones, and an inverse by steps."""

import torch
import torch.nn.functional as F
from torch import Tensor


def segments(mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cut the real tokens of each sequence into `count` stretches of equal length (± 1).

    A sequence of at most `count` real tokens has one stretch for each of them, the others are empty.

    Args:
        mask: bool ``(B, n)``, True for a real token.
        count: the number of stretches.

    Returns:
        The first token of each stretch, counted among the real ones, and the number of its tokens: int64
        ``(B, count)`` each.

    Example:
        >>> segments(torch.ones(1, 7, dtype=torch.bool), 3)
        (tensor([[0, 2, 4]]), tensor([[2, 2, 3]]))
    """
    length = mask.sum(-1, keepdim=True)
    used = length.clamp(1, count)
    number = torch.arange(count, device=mask.device)
    start = number * length // used
    size = (number + 1) * length // used - start
    return start, size.masked_fill(number >= length, 0)


def take(x: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    """The real tokens of x at the given places; zeros where a place is beyond the last real token.

    Args:
        x: ``(B, H, n, d)``.
        mask: bool ``(B, n)``, True for a real token.
        place: int64 ``(B, m)``, counted among the real tokens.

    Returns:
        ``(B, H, m, d)``.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
        >>> take(x, torch.tensor([[True, False, True]]), torch.tensor([[1, 2]])).flatten().tolist()
        [3.0, 0.0]
    """
    # Where no prefix holds enough real tokens the index is n: the row of zeros.
    index = torch.searchsorted(mask.cumsum(-1), place + 1)
    return F.pad(x, (0, 0, 0, 1)).gather(-2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def newton_schulz(matrix: Tensor, start: Tensor, iterations: int) -> Tensor:
    """The (pseudo-)inverse of A by ``Z ← ¼ Z (13 I − AZ (15 I − AZ (7 I − AZ)))``.

    It converges with order three where ``‖AA⁺ − AZ₀‖ < 1``. Singular values below the range that the steps
    reach stay uninverted, which is as if they were zero.

    Args:
        matrix: A, ``(..., m, k)``.
        start: Z₀, ``(..., k, m)``.
        iterations: the number of steps.

    Returns:
        ``(..., k, m)``.

    Example:
        >>> round(newton_schulz(torch.tensor([[0.5]]), torch.tensor([[1.0]]), 6).item(), 5)
        2.0
    """
    identity = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    inverse = start
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = (
            0.25 * inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
        )
    return inverse
