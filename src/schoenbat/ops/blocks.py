"""The one form in which every feature map is executed: linear | quadratic | tail, in ascending degree.

A map sends a row x to monomials; the constant is not among them, for Σv and the count say all it has to say.
The monomials of a chunk are a tuple of blocks, each feature-major, ``(B, H, G, features, n)``: a feature is a
contiguous row, and an identity block is a view of x that costs nothing.

Shapes: x is ``(B, H, G, n, d)`` with G query heads to a key head (keys: G = 1). The map's tensors begin with
``M``, which is 1 (one map for all heads) or H. Sums over a sequence are ``(B, H, 1, F, m)``, F running over
the monomials of all blocks.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from schoenbat.ops.keeping import is_transformed

Monomials = tuple[Tensor, ...]


class Blocks(NamedTuple):
    """A feature map as tensors and ints: what the executors take, never a Module."""

    linear: Tensor  # (M, d, D₁); no columns where the linear part is the identity or absent
    quadratic: Tensor  # (M, d, r): y = Pᵀx, whose pair monomials are the features
    tail: Tensor  # (M, d, Σ degrees): the factors ω, level by level (see `level_sizes`)
    identity: bool  # the linear part is x itself
    num_pairs: int  # pair monomials of y, in the order (0,0) (1,0) (1,1) (2,0) ...
    degrees: tuple[int, ...]  # of the tail's features, ascending, each at least 2

    @property
    def maps(self) -> list[Tensor]:
        """The three tensors as one list, for the schemas of custom operators."""
        return [self.linear, self.quadratic, self.tail]

    @property
    def layout(self) -> list[int]:
        """The three ints as one list, likewise."""
        return [int(self.identity), self.num_pairs, *self.degrees]

    @staticmethod
    def from_layout(maps: Sequence[Tensor], layout: Sequence[int]) -> "Blocks":
        linear, quadratic, tail = maps
        return Blocks(linear, quadratic, tail, bool(layout[0]), layout[1], tuple(layout[2:]))

    @property
    def num_factors(self) -> int:
        """How many factors the tail's features have together."""
        return self.tail.shape[-1]

    @property
    def sizes(self) -> list[int]:
        """How many monomials each block has; blocks that the map does not have are left out.

        A map of constants alone has one block without monomials.
        """
        linear = self.linear.shape[-2] if self.identity else self.linear.shape[-1]
        return [size for size in (linear, self.num_pairs, len(self.degrees)) if size] or [0]


class FeatureMap(NamedTuple):
    """A map with its weights: ``K(⟨x, y⟩) ≈ constant + Σ_f weight_f φ_f(x) φ_f(y)``."""

    blocks: Blocks
    weight: Tensor  # (M, F)
    coefficients: Tensor  # (M, 3): weight of the constant; a₀ and a₁ / a₀, which make the denominator's floor
    scale: float  # the logit scale it is planned for; the keys are multiplied by its square root

    @property
    def key_scale(self) -> float:
        return math.sqrt(self.scale)


def level_sizes(degrees: Sequence[int]) -> list[int]:
    """How many of the tail's features have a factor at level 0, 1, ...: always the last so many of them."""
    return [sum(degree > level for degree in degrees) for level in range(max(degrees, default=0))]


def monomials(x: Tensor, blocks: Blocks) -> Monomials:
    """The unweighted monomials of the rows of x."""
    return Evaluator(blocks).evaluate(x).phi


def weigh(phi: Monomials, weight: Tensor) -> Monomials:
    """Multiply each monomial by its weight ``(M, F)``."""
    parts = weight[:, None, :, None].split([part.shape[-2] for part in phi], dim=-2)
    return tuple(part * w for part, w in zip(phi, parts, strict=True))


def sum_over_rows(phi: Monomials, rows: Tensor) -> Tensor:
    """``Σ_i φ(x_i) rows_iᵀ``: ``(B, H, G, n, m) -> (B, H, G, F, m)``."""
    return torch.cat([product(part, rows) for part in phi], dim=-2)


def apply_to_rows(phi: Monomials, sums: Tensor) -> Tensor:
    """``φ(x_i)ᵀ sums`` for each row: ``(B, H, 1, F, m) -> (B, H, G, n, m)``."""
    blocks = sums.split([part.shape[-2] for part in phi], dim=-2)
    rows = product(phi[0].mT, blocks[0])
    for part, block in zip(phi[1:], blocks[1:], strict=True):
        rows = _add_product(rows, part.mT, block)
    return rows


def total_over_rows(phi: Monomials) -> Tensor:
    """``Σ_i φ(x_i)``, ``(B, H, G, F, 1)``."""
    return torch.cat([part.sum(-1, keepdim=True) for part in phi], dim=-2)


def inner(phi: Monomials, other: Monomials) -> Tensor:
    """``φ(x_i)·φ(y_j)`` for all pairs of rows, ``(B, H, G, n, n')``."""
    return reduce(torch.add, (a.mT @ b for a, b in zip(phi, other, strict=True)))


def from_rows(blocks: Blocks, sums: Tensor, rows: Tensor) -> Monomials:
    """The gradient of φ where that of ``apply_to_rows(phi, sums)`` is `rows`, ``(B, H, G, n, m)``."""
    parts = list(sums.split(blocks.sizes, dim=-2))
    if blocks.identity:  # as a view of a row-major product, like the block itself
        return ((rows @ parts[0].mT).mT, *(part @ rows.mT for part in parts[1:]))
    return tuple(part @ rows.mT for part in parts)


def add(phi: Monomials, more: Monomials) -> Monomials:
    return tuple(a + b for a, b in zip(phi, more, strict=True))


def add_outer_(phi: Monomials, sums: Tensor, row: Tensor) -> Monomials:
    """Add ``sums ⊗ row``, of ``(B, H, 1, F, 1)`` and ``(B, H, G, n, 1)``, in place."""
    parts = sums.split([part.shape[-2] for part in phi], dim=-2)
    return tuple(a.addcmul_(b, row.mT) for a, b in zip(phi, parts, strict=True))


def dot(phi: Monomials, other: Monomials) -> Tensor:
    """``Σ_f φ_f(x_i) ψ_f(x_i)`` for each row, ``(B, H, G, n, 1)``."""
    return reduce(torch.add, ((a * b).sum(-2)[..., None] for a, b in zip(phi, other, strict=True)))


def dot_rows(phi: Monomials, other: Monomials) -> Tensor:
    """``Σ_i φ_f(x_i) ψ_f(x_i)`` for each head and monomial, over batch, group and rows: ``(H, F)``."""
    return torch.cat([(a * b).sum((0, 2, 4)) for a, b in zip(phi, other, strict=True)], dim=-1)


class Evaluated(NamedTuple):
    """Rows with their monomials, and the factors of these, which the gradient needs."""

    x: Tensor
    phi: Monomials
    y: Tensor | None  # Pᵀx, where there are pair monomials
    tail: tuple[Tensor, ...]  # factors of the tail's features, level by level


class Evaluator:
    """A map made ready for one pass over a sequence, with the gradients of its tensors if it is trained."""

    def __init__(self, blocks: Blocks, train: bool = False) -> None:
        self.blocks, self.train = blocks, train
        self.gradients = [torch.zeros_like(t) for t in blocks.maps]

    def evaluate(self, x: Tensor) -> Evaluated:
        """The unweighted monomials of the rows of x."""
        blocks = self.blocks
        phi: list[Tensor] = []
        y: Tensor | None = None
        tail: tuple[Tensor, ...] = ()
        if blocks.identity:
            phi.append(x.mT)
        elif blocks.linear.shape[-1]:
            phi.append(_project(x, blocks.linear))
        if blocks.num_pairs:
            y = _project(x, blocks.quadratic)
            phi.append(_pair_products(y, blocks.num_pairs))
        if blocks.degrees:
            tail = _project(x, blocks.tail).split(level_sizes(blocks.degrees), dim=-2)
            phi.append(_suffix_products(tail)[0])
        return Evaluated(x, tuple(phi) or (x.mT[..., :0, :],), y, tail)

    def backward(self, at: Evaluated, grad: Monomials) -> Tensor:
        """The gradient of x, given that of its monomials, which it may overwrite."""
        blocks, parts = self.blocks, list(grad)
        to_linear, to_quadratic, to_tail = self.gradients
        grad_x = None
        if blocks.identity:
            grad_x = parts.pop(0).mT
        elif blocks.linear.shape[-1]:
            grad_x = self._project_backward(at.x, blocks.linear, parts.pop(0), to_linear, None)
        if at.y is not None:
            grad_y = _pairs_backward(at.y, parts.pop(0))
            grad_x = self._project_backward(at.x, blocks.quadratic, grad_y, to_quadratic, grad_x)
        if blocks.degrees:
            grad_factors = _products_backward(at.tail, parts.pop(0))
            grad_x = self._project_backward(at.x, blocks.tail, grad_factors, to_tail, grad_x)
        return torch.zeros_like(at.x) if grad_x is None else grad_x

    def _project_backward(
        self, x: Tensor, weight: Tensor, grad: Tensor, total: Tensor, grad_x: Tensor | None
    ) -> Tensor:
        if self.train:
            total += sum_over_heads(weight, (x.mT @ grad.mT).sum((0, 2)))
        weight = weight.mT[:, None]
        return grad.mT @ weight if grad_x is None else _add_product(grad_x, grad.mT, weight)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``; with a single column as the transposed product, several times faster on the CPU."""
    return (b.mT @ a.mT).mT if b.shape[-1] == 1 else a @ b


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b``; in place where that may be."""
    if b.shape[-1] == 1 or not _may_write():
        return total + product(a, b)
    b = b.expand(*a.shape[:-2], -1, -1)
    total.view(math.prod(total.shape[:-2]), *total.shape[-2:]).baddbmm_(a.flatten(0, -3), b.flatten(0, -3))
    return total


def _may_write() -> bool:
    """Whether results may go into memory that is there: no autograd, compiler or transform looks on."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed())


def sum_over_heads(parameter: Tensor, per_head: Tensor) -> Tensor:
    """The gradient of a tensor ``(M, ...)`` from that for each head, ``(H, ...)``."""
    return per_head if parameter.shape[0] > 1 else per_head.sum(0, keepdim=True)


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """``(B, H, G, n, d), (M, d, r) -> (B, H, G, r, n)``."""
    return weight.mT[:, None] @ x.mT


def _pair_products(y: Tensor, count: int) -> Tensor:
    """``y_i y_j`` for j ≤ i, the first so many of them, as products of one row with the rows up to it."""
    widths = _pair_widths(count)
    factors = [(y[..., i, None, :], y[..., :width, :]) for i, width in widths]
    if not _may_write():
        return torch.cat([left * right for left, right in factors], dim=-2)
    products = y.new_empty(*y.shape[:-2], count, y.shape[-1])
    rows = products.split([width for _, width in widths], dim=-2)
    for (left, right), out in zip(factors, rows, strict=True):
        torch.mul(left, right, out=out)
    return products


def _pairs_backward(y: Tensor, grad: Tensor) -> Tensor:
    grad_y = torch.zeros_like(y)
    widths = _pair_widths(grad.shape[-2])
    for (i, width), part in zip(widths, grad.split([w for _, w in widths], dim=-2), strict=True):
        grad_y[..., i, :] += (part * y[..., :width, :]).sum(-2)
        grad_y[..., :width, :].addcmul_(part, y[..., i, None, :])
    return grad_y


def _pair_widths(count: int) -> list[tuple[int, int]]:
    """With how many rows of y each row is paired: itself and those before it, until there are enough."""
    rows = (math.isqrt(8 * count - 7) + 1) // 2
    return [(i, min(i + 1, count - i * (i + 1) // 2)) for i in range(rows)]


def _suffix_products(factors: Sequence[Tensor]) -> list[Tensor]:
    """For each level the product of the factors of that level and all above it.

    A level holds factors for the last features only, so the shorter product of the levels above is aligned
    with the end of it.
    """
    products = [factors[-1]]
    for factor in reversed(factors[:-1]):
        above = products[0]
        alone = factor.shape[-2] - above.shape[-2]
        product = factor[..., alone:, :] * above
        products.insert(0, torch.cat([factor[..., :alone, :], product], -2) if alone else product)
    return products


def _products_backward(factors: Sequence[Tensor], grad: Tensor) -> Tensor:
    """The gradient of every factor is that of the product times all the other factors: no division."""
    suffixes = _suffix_products(factors)
    grads = []
    below = grad
    for level, factor in enumerate(factors):
        if level + 1 == len(factors):
            grads.append(below)
            break
        above = suffixes[level + 1]
        alone = factor.shape[-2] - above.shape[-2]
        grads += [below[..., :alone, :], below[..., alone:, :] * above]
        below = below[..., alone:, :] * factor[..., alone:, :]
    return torch.cat(grads, dim=-2)
