"""Dot-product kernels: f(x) = Σ aₙ xⁿ of x = ⟨q, k⟩, with aₙ ≥ 0, for |x| < R.

By Schoenberg's theorem these are the functions of an inner product that are positive definite in every
dimension. The paper's five have names, `polynomial` makes powers, `DotProductKernel.from_expression` takes a
formula.
"""

import ast
import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

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
        return self._inside_radius(x, self._function(x))

    def log(self, x: Tensor) -> Tensor:
        """log f(x), elementwise; NaN where x ≥ radius or f(x) < 0. For "exp" it is x, which cannot overflow.

        The softmax of these logits is attention with this kernel: a score_mod for FlexAttention.

        >>> kernel("exp").log(torch.tensor([1000.0]))
        tensor([1000.])
        """
        return self._inside_radius(x, self._logarithm(x))

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
            key: (..., n_k, d), with as many heads as query.
            scale: None for 1/√d, a float, or a tensor (H,) for inputs (..., H, n, d).

        >>> kernel("inv").check(torch.ones(1, 4), torch.ones(1, 4))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the largest logit, 2, is not below the radius 1 of the kernel 'inv': lower the scale, ...
        """
        if math.isinf(self.radius) or query.numel() == 0 or key.numel() == 0:
            return
        precise = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
        factor = torch.as_tensor(query.shape[-1] ** -0.5 if scale is None else scale).to(
            query.device, precise
        )
        query = query.to(precise) * (factor[:, None, None] if factor.dim() else factor)
        key = key.to(precise)
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
            name: None for the formula itself.

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
        if not radius > 0:
            raise ValueError(f"radius must be positive, got {radius}; pass math.inf for an entire function")
        expression, radius = expression.strip(), float(radius)
        name = expression if name is None else name
        function, logarithm, table = _expand(expression, radius)
        coefficient = functools.partial(_look_up, expression, table)
        recipe = (cls.from_expression, (expression, radius, name))
        return cls(name, radius, function, logarithm, coefficient, recipe)

    def __reduce__(self) -> tuple[Callable[..., "DotProductKernel"], tuple[Any, ...]]:
        return self._recipe

    def __deepcopy__(self, memo: dict[int, Any]) -> "DotProductKernel":
        return self


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
        raise TypeError(f"kernel must be a name or a DotProductKernel, got {type(name_or_kernel).__name__}")
    if name_or_kernel not in _NAMED:
        raise ValueError(f"unknown kernel {name_or_kernel!r}: the names are {', '.join(_NAMED)}")
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
    if not 0 <= offset < math.inf:
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


_FUNCTIONS = (
    *("exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
# On 512 points of the circle of radius R/4 the trapezoidal rule adds aₙ₊₅₁₂ (R/4)⁵¹² to aₙ, 1e-308 of it;
# 320 digits resolve 4^-384. Degrees from 448 up are as small, so that -64 … -1 are read in their places.
_POINTS, _MAX_DEGREE, _DIGITS = 512, 384, 320


def _look_up(text: str, table: tuple[float, ...], degree: int) -> float:
    if degree > _MAX_DEGREE:
        raise ValueError(f"the coefficients of {text!r} are known to degree {_MAX_DEGREE}, not to {degree}")
    if math.isinf(table[degree]):
        raise ValueError(
            f"the coefficient of degree {degree} of {text!r} is too large for float64: rescale x"
        )
    return table[degree]


@functools.lru_cache(maxsize=64)
def _expand(text: str, radius: float) -> tuple[Elementwise, Elementwise, tuple[float, ...]]:
    """f on tensors, log f, and a₀ … a₃₈₄ of a formula, once it has proved to be a kernel of this radius."""
    import mpmath
    import sympy

    expression = _parse(text)
    circle = 0.5 if math.isinf(radius) else radius / 4
    with mpmath.workdps(_DIGITS):
        scaled = _cauchy(text, expression, circle)
        table = tuple(float(value / mpmath.mpf(circle) ** degree) for degree, value in enumerate(scaled))
        logarithms = [float(mpmath.log(value)) if value > 0 else -math.inf for value in scaled]
    for degree, value in enumerate(scaled):
        if value < 0:
            message = f"that of degree {degree} is {table[degree]:g}"
            raise ValueError(f"the coefficients of {text!r} must not be negative: {message}")
    estimate = math.inf if expression.is_polynomial() else circle * _radius_of_convergence(logarithms)
    if radius > 1.05 * estimate:
        message = f"the series converges for |x| < {estimate:.3g} or so; pass that"
        raise ValueError(f"radius={radius:g} is too large for {text!r}: {message}")
    function = _on_tensors(expression)
    _compare(text, function, [float(value) for value in scaled], circle, radius)
    # The logarithm of exp(u) is u, which cannot overflow.
    exponent = _on_tensors(expression.args[0]) if isinstance(expression, sympy.exp) else None
    return function, exponent or (lambda x: torch.log(function(x))), table


def _parse(text: str) -> Any:
    """The formula in sympy, built node by node because sympy's own parser would run the text as code."""
    import sympy

    allowed = f"use x, finite numbers, pi, E, + - * / ** and the functions {', '.join(_FUNCTIONS)}"

    def build(node: ast.AST) -> Any:
        match node:
            case ast.Name(id="x"):
                return sympy.Symbol("x")
            case ast.Name(id="pi" | "E" as constant):
                return getattr(sympy, constant)
            case ast.Constant(value=int() | float() as number) if type(number) is not bool and number < 1e300:
                return sympy.Rational(str(number))
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
                return _OPERATORS[type(sign)](build(operand))
            case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
                base, exponent = build(left), build(right)
                # Without a bound, 9**9**9 would be worked out to its last digit.
                if isinstance(symbol, ast.Pow) and exponent.is_number and not abs(exponent) <= _MAX_DEGREE:
                    raise ValueError(f"the exponent in {ast.unparse(node)!r} must be at most {_MAX_DEGREE}")
                return _OPERATORS[type(symbol)](base, exponent)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                return getattr(sympy, name)(build(argument))
        raise ValueError(f"{ast.unparse(node)!r} in the expression {text!r} is not allowed: {allowed}")

    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"the expression {text!r} is not a formula ({error.msg}): {allowed}") from error
    expression = build(tree)
    if expression.has(sympy.zoo, sympy.nan, sympy.I):
        raise ValueError(f"the expression {text!r} equals {expression}: it must be real and finite")
    if not expression.free_symbols:
        raise ValueError(f"the expression {text!r} equals {expression}: it must depend on x")
    return expression


def _cauchy(text: str, expression: Any, circle: float) -> list[Any]:
    """aₙ·circleⁿ to degree 384, by Cauchy's integral over |z| = circle; 0 for what drowns in rounding."""
    import mpmath
    import sympy

    function = sympy.lambdify(sympy.Symbol("x"), expression, "mpmath")
    roots = mpmath.unitroots(_POINTS)
    try:
        upper = [mpmath.mpc(function(circle * root)) for root in roots[: _POINTS // 2 + 1]]
    except (ZeroDivisionError, ValueError, OverflowError):
        upper = [mpmath.mpc(math.nan)] * (_POINTS // 2 + 1)
    # A real f takes conjugate values at conjugate points; any other is torn on the real axis, and found out.
    values = upper + [value.conjugate() for value in upper[-2:0:-1]]
    laurent = [value / _POINTS for value in _fourier(values, [root.conjugate() for root in roots])]
    largest = max(abs(value) for value in values)
    if not all(abs(value) <= 1e-100 * largest for value in laurent[-64:]):
        raise ValueError(
            f"{text!r} has no Maclaurin series on |x| <= {circle:g}: it is singular, not real or too steep. "
            "If that is so at 0, as for sqrt(x), log(x) and 1/x, it is no kernel; else pass a smaller radius"
        )
    noise = largest * mpmath.mpf(10) ** (20 - _DIGITS)
    return [value.real if abs(value) > noise else mpmath.mpf(0) for value in laurent[: _MAX_DEGREE + 1]]


def _fourier(values: list[Any], roots: list[Any]) -> list[Any]:
    """Σⱼ values[j]·roots[j·n mod N] for n = 0 … N-1, where N is a power of 2."""
    if len(values) == 1:
        return values
    even, odd = _fourier(values[::2], roots[::2]), _fourier(values[1::2], roots[::2])
    pairs = [(a, b * root) for a, b, root in zip(even, odd, roots, strict=False)]
    return [a + b for a, b in pairs] + [a - b for a, b in pairs]


def _radius_of_convergence(logarithms: list[float]) -> float:
    """ρ from log cₙ where cₙ ~ n^p ρ^-n; infinite where cₙ falls faster.

    Between the degrees N/8, N/4, N/2, N the slopes of log cₙ are -log ρ + p·log 2 / distance, so that twice a
    slope less the one before is free of p: constant for a finite ρ, ever falling for an entire function.
    """
    last = max((degree for degree, value in enumerate(logarithms) if value > -math.inf), default=0)
    # The largest of a few degrees stands for each of the four, because odd or even ones may be 0.
    windows = [range(3 * n // 4 + 1, n + 1) for n in (last // 8, last // 4, last // 2, last)]
    anchors = [max(window, key=logarithms.__getitem__, default=0) for window in windows]
    if last < 32 or min(logarithms[degree] for degree in anchors) == -math.inf:
        return math.inf
    slopes = [(logarithms[b] - logarithms[a]) / (b - a) for a, b in itertools.pairwise(anchors)]
    early, late = 2 * slopes[1] - slopes[0], 2 * slopes[2] - slopes[1]
    return math.exp(-late) if late > early - 0.03 else math.inf


def _on_tensors(expression: Any) -> Elementwise:
    """The expression in torch functions; irrational constants and ints too large for torch become floats."""
    import sympy

    def constants_as_floats(part: Any) -> Any:
        if part.is_Symbol or (part.is_Rational and max(abs(part.p), part.q) < 2**53):
            return part
        return part.func(*map(constants_as_floats, part.args)) if part.free_symbols else part.evalf(17)

    functions = {name: getattr(torch, name) for name in _FUNCTIONS}
    return sympy.lambdify(sympy.Symbol("x"), constants_as_floats(expression), [functions])


def _compare(text: str, function: Elementwise, scaled: list[float], circle: float, radius: float) -> None:
    """Hold f on tensors against its series, and see that it rises up to R, as any series with aₙ ≥ 0 does."""
    float64 = functools.partial(torch.tensor, dtype=torch.float64, device="cpu")
    for step in (-2, -1, 0, 1, 2):
        terms = [coefficient * step**n for n, coefficient in enumerate(scaled)]
        value, series = function(float64(step * circle)).item(), math.fsum(terms)
        if not abs(value - series) <= 1e-9 * math.fsum(map(abs, terms)):
            message = f"its series gives {series:g}; write it so that it can be evaluated there"
            raise ValueError(f"{text!r} is {value:g} at x = {step * circle:g}, where {message}")
    points = [] if math.isinf(radius) else [radius * (1 - 2.0**-k) for k in range(21)]
    values = function(float64(points)).tolist()
    for point, before, value in zip(points[1:], values, values[1:], strict=False):
        if not value >= (1 - 1e-9) * before:
            message = f"its value {value:g} at x = {point:.8g} does not continue the rise of its series"
            raise ValueError(f"radius={radius:g} is too large for {text!r}: {message}")
