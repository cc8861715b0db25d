"""Dot-product kernels: f(x) = Σ aₙ xⁿ of x = ⟨q, k⟩, with aₙ ≥ 0, for |x| < R.

By Schoenberg's theorem these are the functions of an inner product that are positive definite in every
dimension. The paper's five have names, `polynomial` makes powers, `DotProductKernel.from_expression` takes a
formula.
"""

import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from schoenbat import expressions
from schoenbat.precision import at_least_float32

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DotProductKernel:
    """A function f(x) = Σ aₙ xⁿ with aₙ ≥ 0 that converges for |x| < radius.

    Made by `kernel`, `polynomial` or `DotProductKernel.from_expression`; immutable, hashable and picklable.

    Attributes:
        name: the kernel's name, or its formula.
        radius: R, where the series stops converging; `math.inf` for entire functions.

    >>> kernel("inv")
    DotProductKernel(name='inv', radius=1.0)
    >>> kernel("inv")(torch.tensor([0.0, 0.5, 1.0]))
    tensor([1., 2., nan])
    """

    name: str
    radius: float
    _function: Elementwise = field(repr=False, compare=False)
    _logarithm: Elementwise = field(repr=False, compare=False)
    _coefficient: Callable[[int], float] = field(repr=False, compare=False)
    _recipe: tuple[Callable[..., "DotProductKernel"], tuple[Any, ...]] = field(repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        """f(x), elementwise and in the dtype of x; NaN where x ≥ radius.

        Below -radius, where the series diverges too, the closed form is returned as it is.

        >>> kernel("exp")(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
        """
        return self._inside_radius(x, self._function(_tensor(x)))

    def log(self, x: Tensor) -> Tensor:
        """log f(x), elementwise; NaN where x ≥ radius or f(x) < 0. For "exp" it is x, which cannot overflow.

        The softmax of these logits is attention with this kernel: a score_mod for FlexAttention.

        >>> kernel("exp").log(torch.tensor([1000.0]))
        tensor([1000.])
        """
        return self._inside_radius(x, self._logarithm(_tensor(x)))

    @property
    def is_exponential(self) -> bool:
        """Whether it is the kernel eˣ, so that attention is softmax and a common shift of all logits cancels.

        By its two names: a formula such as ``"exp(x)"`` is not looked into.

        >>> kernel("exp").is_exponential, kernel("trigh").is_exponential, kernel("inv").is_exponential
        (True, True, False)
        """
        return self.name in ("exp", "trigh")

    def _inside_radius(self, x: Tensor, values: Tensor) -> Tensor:
        return values if self.radius == math.inf else torch.where(x < self.radius, values, math.nan)

    def coefficients(self, max_degree: int) -> Tensor:
        """a₀ … a_max_degree, a float64 CPU tensor of max_degree + 1 elements; 0 where too small for float64.

        >>> kernel("exp").coefficients(4)
        tensor([1.0000, 1.0000, 0.5000, 0.1667, 0.0417], dtype=torch.float64)
        """
        if not isinstance(max_degree, int) or isinstance(max_degree, bool):
            raise TypeError(
                f"max_degree must be an int, got {max_degree!r} of type {type(max_degree).__name__}"
            )
        if max_degree < 0:
            raise ValueError(f"max_degree must be at least 0, got {max_degree}")
        return torch.tensor(_coefficients(self, max_degree), dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def check(self, query: Tensor, key: Tensor, scale: float | Tensor | None = None) -> None:
        """Raise ValueError if any logit scale·⟨q, k⟩ reaches the radius; waits for the device.

        Args:
            query: (..., n_q, d).
            key: (..., n_k, d); of inputs (..., H, n, d) several query heads may share a key head.
            scale: None for 1/√d, a float, or a tensor (H,) for inputs (..., H, n, d).

        >>> kernel("inv").check(torch.ones(1, 4), torch.ones(1, 4))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the largest logit, 2, is not below the radius 1 of the kernel 'inv': lower the scale, ...
        """
        for name, rows in (("query", query), ("key", key)):
            if not isinstance(rows, Tensor):
                raise TypeError(f"{name} must be a tensor (..., n, d), got {rows!r}")
            if rows.dim() < 2:
                raise ValueError(f"{name} must be a tensor (..., n, d), got {tuple(rows.shape)}")
        if not (scale is None or isinstance(scale, numbers.Real | Tensor)):
            raise TypeError(f"scale must be a number, a tensor or None, got {scale!r}")
        if math.isinf(self.radius) or query.numel() == 0 or key.numel() == 0:
            return
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"query and key must have the same head dimension, got {query.shape[-1]} and {key.shape[-1]}"
            )
        precise = at_least_float32(torch.promote_types(query.dtype, key.dtype))
        factor = torch.as_tensor(query.shape[-1] ** -0.5 if scale is None else scale, device=query.device)
        heads = query.shape[-3:-2]
        if factor.dim() > 1 or factor.numel() not in (1, *heads):
            raise ValueError(
                f"scale must be a float or a tensor of one value per query head {tuple(heads)}, got shape "
                f"{tuple(factor.shape)}"
            )
        factor = factor.to(precise)
        query = query.to(precise) * (factor[:, None, None] if factor.dim() else factor)
        key = _for_each_query_head(key.to(precise), query)
        # A few million logits at a time: all at once they would be quadratic in the sequence length.
        logits_per_row = key.shape[-2] * max(query[..., 0, 0].numel(), key[..., 0, 0].numel())
        largest = max(
            (rows @ key.mT).nan_to_num(nan=-math.inf, posinf=math.inf).max().item()
            for rows in query.split(max(1, 2**22 // logits_per_row), dim=-2)
        )
        if largest >= self.radius:
            raise ValueError(
                f"the largest logit, {largest:.6g}, is not below the radius {self.radius:g} of the kernel "
                f"{self.name!r}: lower the scale, normalise query and key, or take the kernel 'exp'"
            )

    @classmethod
    def from_expression(
        cls, expression: str, radius: float = math.inf, name: str | None = None
    ) -> "DotProductKernel":
        """The kernel of a formula, with aₙ = (1/2πi) ∮ f(z) z^-(n+1) dz integrated numerically for n ≤ 384.

        The formula is made of x, numbers, pi, E, + - * / ** and functions such as exp, log, sqrt and cosh.
        ValueError if a coefficient is negative, if f is not analytic at 0, or if the radius is too large.

        Args:
            expression: the formula in Python's notation.
            radius: the radius of convergence, or less.
            name: None for the formula itself; not that of another kernel, such as ``"exp"``.

        >>> DotProductKernel.from_expression("2 - sqrt(1 - x)", radius=1.0).coefficients(3)
        tensor([1.0000, 0.5000, 0.1250, 0.0625], dtype=torch.float64)
        >>> DotProductKernel.from_expression("cos(x)")
        Traceback (most recent call last):
        ...
        ValueError: the coefficients of 'cos(x)' must not be negative: that of degree 2 is -0.5
        """
        if not isinstance(expression, str):
            raise TypeError(
                f"expression must be a str, got {expression!r} of type {type(expression).__name__}"
            )
        if not _number("radius", radius) > 0:
            raise ValueError(f"radius must be positive, got {radius}; pass math.inf for an entire function")
        if name in _NAMED:
            raise ValueError(f"{name!r} is the name of another kernel; choose one of your own, or none")
        expression, radius = expression.strip(), float(radius)
        name = expression if name is None else name
        function, logarithm, table = expressions.expand(expression, radius)
        coefficient = functools.partial(expressions.look_up, expression, table)
        recipe = (cls.from_expression, (expression, radius, name))
        return cls(name, radius, function, logarithm, coefficient, recipe)

    def __reduce__(self) -> tuple[Callable[..., "DotProductKernel"], tuple[Any, ...]]:
        return self._recipe

    def __deepcopy__(self, memo: dict[int, Any]) -> "DotProductKernel":
        return self


def _for_each_query_head(key: Tensor, query: Tensor) -> Tensor:
    """Key heads that several query heads share, as often as they are shared; one alone meets all keys."""
    if query.dim() < 3 or key.dim() < 3 or query.shape[-3] in (1, key.shape[-3]):
        return key
    if not key.shape[-3] or query.shape[-3] % key.shape[-3]:
        raise ValueError(f"{query.shape[-3]} query heads cannot share {key.shape[-3]} key heads evenly")
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)


def _tensor(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {x!r} of type {type(x).__name__}")
    return x


def _number(name: str, value: Any) -> Any:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return value


# Floats, not a tensor: one that was made under a fake-tensor mode would be served to everybody afterwards.
@functools.lru_cache(maxsize=256)
def _coefficients(kernel: DotProductKernel, max_degree: int) -> tuple[float, ...]:
    return tuple(kernel._coefficient(degree) for degree in range(max_degree + 1))


# Quotients of Python ints are rounded once and underflow to 0.
def _exp_coefficient(degree: int) -> float:
    return 1 / math.factorial(degree)


def _sqrt_coefficient(degree: int) -> float:
    """(2n-3)!! / (2ⁿ n!) = binom(2n, n) / ((2n-1) 4ⁿ)."""
    return 1.0 if degree == 0 else math.comb(2 * degree, degree) / ((2 * degree - 1) * 4**degree)


# Radius, f, log f, aₙ. The logarithms keep their relative accuracy near x = 0, where f is 1 + small.
_NAMED: dict[str, tuple[float, Elementwise, Elementwise, Callable[[int], float]]] = {
    "exp": (math.inf, torch.exp, lambda x: x, _exp_coefficient),
    "inv": (1.0, lambda x: 1 / (1 - x), lambda x: -torch.log1p(-x), lambda n: 1.0),
    "logi": (
        1.0,
        lambda x: 1 - torch.log1p(-x),
        lambda x: torch.log1p(-torch.log1p(-x)),
        lambda n: 1 / max(1, n),
    ),
    "trigh": (math.inf, torch.exp, lambda x: x, _exp_coefficient),
    "sqrt": (
        1.0,
        lambda x: 2 - torch.sqrt(1 - x),
        lambda x: torch.log1p(x / (1 + torch.sqrt(1 - x))),
        _sqrt_coefficient,
    ),
}


def kernel(name_or_kernel: str | DotProductKernel) -> DotProductKernel:
    """The kernel of this name; a `DotProductKernel` passes through.

    | name  | f(x)              | R | aₙ                            |
    | ----- | ----------------- | - | ----------------------------- |
    | exp   | eˣ                | ∞ | 1/n!                          |
    | inv   | 1/(1-x)           | 1 | 1                             |
    | logi  | 1 - log(1-x)      | 1 | 1/max(1, n)                   |
    | trigh | sinh(x) + cosh(x) | ∞ | 1/n!, as it is eˣ by identity |
    | sqrt  | 2 - √(1-x)        | 1 | 1, 1/2, then (2n-3)!!/(2ⁿ n!) |

    Table 1 of the paper misprints the coefficients of logi and sqrt; these belong to its f.

    >>> kernel("sqrt").coefficients(3)
    tensor([1.0000, 0.5000, 0.1250, 0.0625], dtype=torch.float64)
    """
    if isinstance(name_or_kernel, DotProductKernel):
        return name_or_kernel
    if not isinstance(name_or_kernel, str):
        raise TypeError(
            f"kernel must be a name or a DotProductKernel, got {type(name_or_kernel).__name__}; "
            "make one of a formula with DotProductKernel.from_expression('...')"
        )
    if name_or_kernel not in _NAMED:
        raise ValueError(
            f"unknown kernel {name_or_kernel!r}: the names are {', '.join(_NAMED)}; others are made by "
            "polynomial(...) and DotProductKernel.from_expression('...')"
        )
    return DotProductKernel(name_or_kernel, *_NAMED[name_or_kernel], _recipe=(kernel, (name_or_kernel,)))


def polynomial(degree: int, offset: float = 1.0) -> DotProductKernel:
    """The kernel (offset + x)^degree, with aₙ = binom(degree, n)·offset^(degree-n) and infinite radius.

    Args:
        degree: 1 to 64.
        offset: at least 0; with 0 there is no constant a₀, which linear attention needs.

    >>> polynomial(2, offset=3.0).coefficients(4)
    tensor([9., 6., 1., 0., 0.], dtype=torch.float64)
    """
    if not isinstance(degree, int) or isinstance(degree, bool):
        raise TypeError(f"degree must be an int, got {degree!r} of type {type(degree).__name__}")
    if not 1 <= degree <= 64:
        raise ValueError(f"degree must be from 1 to 64, got {degree}")
    if not 0 <= _number("offset", offset) < math.inf:
        raise ValueError(
            f"offset must be finite and, lest a coefficient be negative, at least 0; got {offset}"
        )
    if degree * math.log10(1 + offset) > 300:
        raise ValueError(f"offset {offset:g} to the power {degree} does not fit float64: lower one of them")
    offset = float(offset)
    squarings = [digit == "1" for digit in f"{degree:b}"[1:]]

    # Not **, because torch.compile makes a symbol of an int that it has seen change, and pow takes no symbol.
    def power(x: Tensor) -> Tensor:
        result = base = offset + x
        for odd in squarings:
            result = result * result * base if odd else result * result
        return result

    return DotProductKernel(
        f"polynomial({degree}, offset={offset!r})",
        math.inf,
        power,
        # An even power is positive where its base is negative.
        lambda x: degree * torch.log((offset + x).abs() if degree % 2 == 0 else offset + x),
        lambda n: float(math.comb(degree, n) * Fraction(offset) ** max(0, degree - n)),
        (polynomial, (degree, offset)),
    )
