"""A formula in x as a function on tensors and as a Maclaurin series, for kernels that users bring.

sympy and mpmath, which torch itself depends on, are loaded when a formula is.
"""

import ast
import cmath
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]

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
_LONGEST = 1000


def look_up(text: str, table: tuple[float, ...], degree: int) -> float:
    """The coefficient of this degree, or an error that says why there is none."""
    if degree > _MAX_DEGREE:
        raise ValueError(f"the coefficients of {text!r} are known to degree {_MAX_DEGREE}, not to {degree}")
    if math.isinf(table[degree]):
        raise ValueError(
            f"the coefficient of degree {degree} of {text!r} is too large for float64: rescale x"
        )
    return table[degree]


@functools.lru_cache(maxsize=64)
def expand(text: str, radius: float) -> tuple[Elementwise, Elementwise, tuple[float, ...]]:
    """f on tensors, log f, and a₀ … a₃₈₄ of a formula, once it has proved to be a kernel of this radius."""
    import mpmath
    import sympy

    circle = 0.5 if math.isinf(radius) else radius / 4
    expression = _parse(text, circle)
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


def _parse(text: str, circle: float) -> Any:
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

    if len(text) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST:,} characters, this one has {len(text):,}")
    try:
        tree = ast.parse(text, mode="eval").body
        _refuse_enormous(text, tree, circle)
        expression = build(tree)
    except SyntaxError as error:
        raise ValueError(f"the expression {text!r} is not a formula ({error.msg}): {allowed}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"the expression {text!r} is nested too deeply; write it flatter") from error
    if expression.has(sympy.zoo, sympy.nan, sympy.I):
        raise ValueError(f"the expression {text!r} equals {expression}: it must be real and finite")
    if not expression.free_symbols:
        raise ValueError(f"the expression {text!r} equals {expression}: it must depend on x")
    return expression


def _refuse_enormous(text: str, tree: ast.AST, circle: float) -> None:
    """Refuse what exceeds float64 on the circle: exact arithmetic would work it out to its last digit."""

    def evaluate(node: ast.AST, z: complex) -> complex:
        match node:
            case ast.Name(id="x"):
                return z
            case ast.Name(id="pi" | "E" as constant):
                return complex(getattr(math, constant.lower()))
            case ast.Constant(value=int() | float() as number):
                return complex(number)
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
                return complex(_OPERATORS[type(sign)](evaluate(operand, z)))
            case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
                base, exponent = evaluate(left, z), evaluate(right, z)
                result = complex(_OPERATORS[type(symbol)](base, exponent))
                depends = any(isinstance(part, ast.Name) and part.id == "x" for part in ast.walk(left))
                if isinstance(symbol, ast.Pow) and base and not result and not depends:
                    raise OverflowError
                return result
            case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _FUNCTIONS:
                return complex(getattr(cmath, name)(evaluate(argument, z)))
        return 0j  # not a formula, which `_parse` says

    for point in range(8):
        try:
            evaluate(tree, circle * cmath.exp(0.25j * math.pi * point))
        except OverflowError:
            raise ValueError(
                f"part of {text!r} does not fit float64 at |x| = {circle:g}: rescale x, or lower the radius"
            ) from None
        except (ZeroDivisionError, ValueError):  # singular there, which `_cauchy` finds out
            continue


def _cauchy(text: str, expression: Any, circle: float) -> list[Any]:
    """aₙ·circleⁿ to degree 384, by Cauchy's integral over |z| = circle; 0 for what drowns in errors.

    These are rounding, and the coefficients 512 degrees up, which are no larger than those beyond 384.
    """
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
    noise = max(largest * mpmath.mpf(10) ** (20 - _DIGITS), *map(abs, laurent[_MAX_DEGREE + 1 :]))
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
