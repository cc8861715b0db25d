"""Gradients as autograd has them, and as the operators do."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def what_is_trained(trained: Sequence[Tensor], coefficients: Tensor) -> list[Tensor]:
    """What of a trained map gets gradients."""
    return [*trained[:4], coefficients] if trained else []


def of_trained(to_map: Sequence[Tensor]) -> tuple[list[Any], Tensor | None]:
    """The gradients of `trained` and of the coefficients, as autograd wants them."""
    return ([*to_map[:4], None, None, None], to_map[4]) if to_map else ([], None)


def or_zeros(grad: Tensor | None, query: Tensor, columns: int) -> Tensor:
    """The gradient of an output, which nobody may have given."""
    return query.new_zeros(*query.shape[:-1], columns) if grad is None else grad
