"""Kernels against exact power series, derived here by series arithmetic and not by the closed formulas."""

import copy
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schoenbat.kernels import DotProductKernel, kernel, polynomial

DEGREES = 41
NAMES = ["exp", "inv", "logi", "trigh", "sqrt"]
EXPRESSIONS = {
    "exp": ("exp(x)", math.inf),
    "inv": ("1 / (1 - x)", 1.0),
    "logi": ("1 - log(1 - x)", 1.0),
    "trigh": ("sinh(x) + cosh(x)", math.inf),
    "sqrt": ("2 - sqrt(1 - x)", 1.0),
}
from_expression = DotProductKernel.from_expression


@pytest.mark.parametrize("name", NAMES)
def test_a_formula_does_not_take_the_name_of_another_kernel(name):
    with pytest.raises(ValueError, match=f"'{name}' is the name of another kernel"):
        from_expression("1 + x + x**2", name=name)


def product(first: list[Fraction], second: list[Fraction]) -> list[Fraction]:
    return [sum((first[k] * second[n - k] for k in range(n + 1)), Fraction(0)) for n in range(DEGREES)]


def geometric_series() -> list[Fraction]:
    """s = 1 + x s."""
    series = [Fraction(1)]
    while len(series) < DEGREES:
        series.append(series[-1])
    return series


def exponential_series() -> list[Fraction]:
    """s' = s, s(0) = 1."""
    series = [Fraction(1)]
    while len(series) < DEGREES:
        series.append(series[-1] / len(series))
    return series


def logarithm_series() -> list[Fraction]:
    """1 + ∫ 1/(1-x)."""
    return [Fraction(1)] + [value / (n + 1) for n, value in enumerate(geometric_series()[: DEGREES - 1])]


def square_root_series() -> list[Fraction]:
    """2 - s, where s² = 1 - x is solved term by term."""
    target = [Fraction(1), Fraction(-1)] + [Fraction(0)] * (DEGREES - 2)
    root = [Fraction(1)]
    for n in range(1, DEGREES):
        root.append((target[n] - sum(root[k] * root[n - k] for k in range(1, n))) / 2)
    assert product(root, root) == target
    return [2 - root[0]] + [-value for value in root[1:]]


EXACT = {
    "exp": exponential_series(),
    "inv": geometric_series(),
    "logi": logarithm_series(),
    "trigh": exponential_series(),
    "sqrt": square_root_series(),
}


def assert_within_units_of_rounding(coefficients: Tensor, exact: list[Fraction], units: float) -> None:
    assert coefficients.dtype == torch.float64
    assert coefficients.device.type == "cpu"
    assert coefficients.shape == (len(exact),)
    for value, expected in zip(coefficients.tolist(), exact, strict=True):
        assert abs(Fraction(value) - expected) <= units * Fraction(2) ** -53 * expected


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_are_the_exact_ones_rounded_once(name: str) -> None:
    assert_within_units_of_rounding(kernel(name).coefficients(DEGREES - 1), EXACT[name], units=1)


@pytest.mark.parametrize("name", NAMES)
def test_from_expression_finds_the_coefficients_of_the_named_kernel(name: str) -> None:
    expression, radius = EXPRESSIONS[name]
    made = from_expression(expression, radius=radius)
    assert (made.name, made.radius) == (expression, radius)
    assert_within_units_of_rounding(made.coefficients(DEGREES - 1), EXACT[name], units=1)
    known, found = kernel(name).coefficients(384), made.coefficients(384)
    torch.testing.assert_close(found, known, rtol=1e-15, atol=1e-250)


@pytest.mark.parametrize(("degree", "offset"), [(1, 1.0), (3, 0.0), (5, 2.5), (40, 0.1), (64, 1.0)])
def test_polynomial_coefficients_are_those_of_repeated_multiplication(degree: int, offset: float) -> None:
    factor = [Fraction(offset), Fraction(1)] + [Fraction(0)] * (DEGREES - 2)
    series = [Fraction(1)] + [Fraction(0)] * (DEGREES - 1)
    for _ in range(degree):
        series = product(series, factor)
    made = polynomial(degree, offset)
    assert made.radius == math.inf
    assert_within_units_of_rounding(made.coefficients(DEGREES - 1), series, units=1)


@pytest.mark.parametrize("name", NAMES)
def test_many_degrees_neither_overflow_nor_turn_negative(name: str) -> None:
    coefficients = kernel(name).coefficients(600)
    assert coefficients.isfinite().all()
    assert (coefficients >= 0).all()


def test_coefficients_are_cached_and_cannot_be_spoilt() -> None:
    kernel("inv").coefficients(3).zero_()
    assert kernel("inv").coefficients(3).tolist() == [1, 1, 1, 1]
    with torch.device("meta"):
        assert kernel("inv").coefficients(7).device.type == "cpu"


@pytest.mark.parametrize("name", NAMES)
def test_values_are_taken_of_tensors(name: str) -> None:
    for call in (kernel(name), kernel(name).log):
        with pytest.raises(TypeError, match=r"x must be a tensor, got 0\.5 of type float"):
            call(0.5)


@pytest.mark.parametrize(("max_degree", "error"), [(-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_max_degree_must_be_a_natural_number(max_degree: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"max_degree must be .* got {max_degree}"):
        kernel("exp").coefficients(max_degree)


@pytest.fixture(params=[*NAMES, "polynomial(4, 0.5)", "polynomial(3)", *EXPRESSIONS.values()], ids=str)
def one(request: pytest.FixtureRequest) -> DotProductKernel:
    if isinstance(request.param, tuple):
        return from_expression(*request.param)
    polynomials = {"polynomial(4, 0.5)": polynomial(4, 0.5), "polynomial(3)": polynomial(3)}
    return polynomials.get(request.param) or kernel(request.param)


def test_values_are_the_sums_of_the_series(one: DotProductKernel) -> None:
    x = torch.linspace(-0.7, 0.7, 29, dtype=torch.float64).view(1, 29)
    powers = x[..., None] ** torch.arange(201)
    torch.testing.assert_close(one(x), (powers * one.coefficients(200)).sum(-1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_logarithms_keep_the_dtype(one: DotProductKernel, dtype: torch.dtype) -> None:
    x = torch.linspace(-0.4, 0.9, 14, dtype=dtype)
    exact = one(x.double())
    rounding = 8 * torch.finfo(dtype).eps
    assert one(x).dtype == one.log(x).dtype == dtype
    # f is steep towards its radius, so that the rounding of 1 - x counts tenfold.
    torch.testing.assert_close(one(x).double(), exact, rtol=10 * rounding, atol=0)
    torch.testing.assert_close(one.log(x).double(), exact.log(), rtol=rounding, atol=10 * rounding)


@pytest.mark.parametrize("name", NAMES)
def test_logarithm_is_accurate_near_zero(name: str) -> None:
    x = torch.tensor([1e-6, -3e-5, 2e-4])
    torch.testing.assert_close(
        kernel(name).log(x).double(), kernel(name)(x.double()).log(), rtol=1e-6, atol=0
    )


def test_logarithm_does_not_overflow() -> None:
    x = torch.tensor([500.0])
    for exponential in (kernel("exp"), kernel("trigh"), from_expression("exp(x)")):
        assert exponential(x).isinf().all()
        assert torch.equal(exponential.log(x), x)
    torch.testing.assert_close(polynomial(64).log(x), torch.tensor([64 * math.log(501)]))


def test_logarithm_of_an_even_power_of_a_negative_number() -> None:
    x = torch.tensor([-3.0])
    torch.testing.assert_close(polynomial(2).log(x), torch.tensor([math.log(4)]))
    assert polynomial(3).log(x).isnan().all()


@pytest.mark.parametrize("name", ["inv", "logi", "sqrt"])
def test_nan_from_the_radius_on(name: str) -> None:
    x = torch.tensor([0.999, 1.0, 1.5, math.inf, math.nan])
    made = from_expression(*EXPRESSIONS[name])
    for values in (kernel(name)(x), kernel(name).log(x), made(x), made.log(x)):
        assert values.isnan().tolist() == [False, True, True, True, True]


def test_nan_from_a_radius_smaller_than_the_formulas_own() -> None:
    made = from_expression("exp(x)", radius=0.5)
    assert made(torch.tensor([0.49, 0.5, -3.0])).isnan().tolist() == [False, True, False]


def test_gradients_are_right_inside_the_radius(one: DotProductKernel) -> None:
    x = torch.tensor([-0.4, 0.0, 0.3, 0.95], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(one, (x,))
    assert torch.autograd.gradcheck(one.log, (x,))


def test_gradients_beside_a_value_outside_are_untouched() -> None:
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    kernel("inv")(x).sum().backward()
    assert x.grad is not None
    assert x.grad[0] == 4


def test_one_compiled_function_serves_kernel_after_kernel() -> None:
    """Numbers that torch.compile has seen change become symbols, which not every operation takes."""
    torch._dynamo.reset()
    # The capture is what can fail; generating code would need a C++ compiler.
    compiled = torch.compile(lambda one, x: one(x) + one.log(x), fullgraph=True, backend="aot_eager")
    tan = from_expression("1 + tan(x)", radius=1.5)
    x = torch.tensor([-0.4, 0.3, 0.95, 1.0], requires_grad=True)
    for one in (kernel("logi"), kernel("exp"), tan, polynomial(2), polynomial(3, 0.5)):
        values, expected = compiled(one, x), one(x) + one.log(x)
        torch.testing.assert_close(values, expected, equal_nan=True)
        gradients = [torch.autograd.grad(y[:3].sum(), x)[0] for y in (values, expected)]
        torch.testing.assert_close(*gradients, equal_nan=True)


def test_vectorises(one: DotProductKernel) -> None:
    x = torch.tensor([[-0.4, 0.3], [0.95, 1.0]])
    torch.testing.assert_close(torch.func.vmap(one)(x), one(x), equal_nan=True)
    torch.testing.assert_close(torch.func.vmap(one.log)(x), one.log(x), equal_nan=True)


def test_copies_and_pickles_are_equal_and_work(one: DotProductKernel) -> None:
    x = torch.tensor([0.25])
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert other == one
        assert hash(other) == hash(one)
        assert (other.name, other.radius, repr(other)) == (one.name, one.radius, repr(one))
        assert torch.equal(other(x), one(x))
        assert torch.equal(other.coefficients(9), one.coefficients(9))


def test_a_fresh_process_reads_a_pickle_and_imports_no_formula_machinery_before() -> None:
    data = pickle.dumps(from_expression("1 / (1 - x)", radius=1.0, name="mine"))
    script = (
        "import pickle, sys, torch; before = set(sys.modules); import schoenbat.kernels;"
        "print({name.split('.')[0] for name in set(sys.modules) - before} & {'sympy', 'mpmath'});"
        f"mine = pickle.loads({data!r}); print(mine.name, mine.coefficients(2).tolist())"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.split("\n")[:2] == ["set()", "mine [1.0, 1.0, 1.0]"]


def test_equality_is_by_definition_and_not_by_name() -> None:
    assert kernel("exp") == kernel("exp") != kernel("trigh")
    assert polynomial(2) == polynomial(2, 1) != polynomial(2, 1.5)
    assert from_expression("exp(x)", name="mine") != from_expression("exp(2*x)", name="mine")
    assert len({kernel("exp"), kernel("exp"), kernel("inv"), polynomial(2)}) == 3


def test_kernels_are_immutable() -> None:
    with pytest.raises(AttributeError):
        kernel("exp").radius = 2.0  # type: ignore[misc]


def test_kernel_by_name() -> None:
    assert kernel(polynomial(2)) == polynomial(2)
    names = "unknown kernel 'gauss': the names are exp, inv, logi, trigh, sqrt; others .*from_expression"
    with pytest.raises(ValueError, match=names):
        kernel("gauss")
    with pytest.raises(TypeError, match="got int; make one of a formula"):
        kernel(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("degree", "offset", "error", "message"),
    [
        (0, 1.0, ValueError, "from 1 to 64, got 0"),
        (65, 1.0, ValueError, "from 1 to 64, got 65"),
        (2.0, 1.0, TypeError, "must be an int, got 2.0"),
        (True, 1.0, TypeError, "must be an int, got True"),
        (2, -0.5, ValueError, "got -0.5"),
        (2, None, TypeError, "offset must be a number, got None"),
        (2, math.nan, ValueError, "got nan"),
        (2, math.inf, ValueError, "got inf"),
        (64, 1e5, ValueError, "does not fit float64"),
    ],
)
def test_polynomial_refuses(degree: int, offset: float, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        polynomial(degree, offset)


def test_check_names_the_largest_logit_and_the_radius() -> None:
    query, key = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4)
    query[1, 2, 4, 0], key[1, 2, 6, 0] = 1.5, 2.0
    kernel("exp").check(100 * query, key)
    kernel("inv").check(query, key, scale=0.33)
    with pytest.raises(
        ValueError, match=r"largest logit, 1.5, is not below the radius 1 .*'inv': lower the scale"
    ):
        kernel("inv").check(query, key)
    with pytest.raises(ValueError, match="largest logit, 3,"):
        kernel("inv").check(query.bfloat16(), key.bfloat16(), scale=1.0)
    kernel("inv").check(-query, key, scale=10.0)


def test_check_reaches_the_radius_at_equality() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="radius 1 "):
        kernel("sqrt").check(one, one)
    kernel("sqrt").check(one, one.nextafter(torch.zeros(())))


def test_check_does_not_round_logits_to_the_dtype_of_the_input() -> None:
    query, key = torch.tensor([[0.996, 0.05]]).bfloat16(), torch.tensor([[1.0, 0.06]]).bfloat16()
    assert (query @ key.mT).item() == 1
    kernel("inv").check(query, key, scale=1.0)


def test_check_takes_one_scale_per_head() -> None:
    query = torch.zeros(2, 3, 5, 4)
    query[:, 1, 2, 0] = 1.0
    kernel("inv").check(query, query, scale=torch.tensor([5.0, 0.9, 5.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="largest logit, 2,"):
        kernel("inv").check(query, query, scale=torch.tensor([0.1, 2.0, 0.1]))
    for scale in (torch.ones(2), torch.ones(3, 1)):
        with pytest.raises(ValueError, match=r"one value per query head \(3,\), got shape"):
            kernel("inv").check(query, query, scale=scale)


def test_check_names_widths_that_differ() -> None:
    with pytest.raises(ValueError, match="same head dimension, got 4 and 5"):
        kernel("inv").check(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 5))


@pytest.mark.parametrize("name", ["exp", "inv"])
def test_check_names_what_is_no_tensor_of_rows(name) -> None:
    rows = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"query must be a tensor \(..., n, d\), got \(4,\)"):
        kernel(name).check(rows[0], rows)
    with pytest.raises(TypeError, match=r"key must be a tensor \(..., n, d\), got None"):
        kernel(name).check(rows, None)
    with pytest.raises(TypeError, match="scale must be a number, a tensor or None, got 'learned'"):
        kernel(name).check(rows, rows, "learned")


def test_check_knows_key_heads_that_are_shared() -> None:
    query, key = torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 7, 4)
    query[1, 3, 4, 0], key[1, 1, 6, 0] = 1.0, 2.0
    kernel("inv").check(query, key, scale=0.49)
    with pytest.raises(ValueError, match="largest logit, 2,"):
        kernel("inv").check(query, key, scale=1.0)
    key = key.roll(1, dims=1)  # another head's
    kernel("inv").check(query, key, scale=1.0)
    with pytest.raises(ValueError, match="6 query heads cannot share 4 key heads evenly"):
        kernel("inv").check(query, torch.zeros(2, 4, 7, 4))
    with pytest.raises(ValueError, match="largest logit, 2,"):  # one query for all key heads
        kernel("inv").check(query[1:, 3:4], key, scale=1.0)


def test_check_looks_at_every_chunk_and_past_nan() -> None:
    length = 5000
    query, key = torch.zeros(length, 1), torch.zeros(length, 1)
    for row in (0, length // 2, length - 1):
        query.zero_()
        query[row] = key[length - 1] = 1.0
        query[1] = math.nan
        with pytest.raises(ValueError, match="largest logit, 1,"):
            kernel("inv").check(query, key)
    kernel("inv").check(query[:0], key)


@pytest.mark.parametrize(
    ("expression", "radius", "message"),
    [
        ("cos(x)", math.inf, "degree 2 is -0.5"),
        ("exp(x) - 2 * x**30", math.inf, "degree 30 is -2"),
        ("sqrt(x)", 1.0, r"'sqrt\(x\)' has no Maclaurin series on \|x\| <= 0.25"),
        ("1 / x", 1.0, "has no Maclaurin series"),
        ("log(x)", 1.0, "has no Maclaurin series"),
        ("sqrt(x**2)", 1.0, "has no Maclaurin series"),
        ("x**2.5", math.inf, "has no Maclaurin series"),
        ("(-8)**(1/3) * x", 1.0, "has no Maclaurin series"),
        ("1 / (1 - x)", 4.0, "has no Maclaurin series .* smaller radius"),
        ("1 / (1 - x)", math.inf, r"radius=inf is too large .* \|x\| < 1 or so"),
        ("1 / (1 - x)", 2.0, r"radius=2 is too large .* \|x\| < 1 or so"),
        ("1 / (1 - x)", 1.001, "radius=1.001 is too large"),
        ("2 - sqrt(1 - x)", math.inf, r"\|x\| < (1|0.99\d|1.00\d?) or so"),
        ("2 - sqrt(1 - x)", 1.001, "value nan at x = 1.0"),
        ("1 / (1 - x**2 / 2500)", math.inf, r"\|x\| < 50 or so"),
        ("sinh(x) / x", math.inf, "nan at x = 0, where its series gives 1"),
        ("exp(x)", 0.0, "radius must be positive, got 0"),
        ("exp(x)", -1.0, "radius must be positive, got -1"),
        ("exp(x)", math.nan, "radius must be positive, got nan"),
        ("exp(x", 1.0, r"'exp\(x' is not a formula"),
        ("", 1.0, "'' is not a formula"),
        ("x = 1", 1.0, "is not a formula"),
        ("x + y", 1.0, "'y' in the expression"),
        ("abs(x)", 1.0, r"'abs\(x\)' in the expression"),
        ("x ^ 2", 1.0, r"'x \^ 2' in the expression"),
        ("x.real", 1.0, "'x.real' in the expression"),
        ("__import__('os').system('true')", 1.0, "__import__.* is not allowed"),
        ("exp(x, 2)", 1.0, r"'exp\(x, 2\)' in the expression"),
        ("(lambda: x)()", 1.0, "is not allowed"),
        ("x if x else 1", 1.0, "is not allowed"),
        ("1j * x", 1.0, "'1j' in the expression"),
        ("True * x", 1.0, "'True' in the expression"),
        ("1e999 * x", 1.0, "is not allowed: use x, finite numbers"),
        ("'x'", 1.0, "is not allowed"),
        ("x + 9**9**9", 1.0, "does not fit float64"),
        ("x + x**385", 1.0, r"exponent in 'x \*\* 385' must be at most 384"),
        ("x / 0", 1.0, "must be real and finite"),
        ("sqrt(-1) * x", 1.0, "must be real and finite"),
        ("x - x + 3", 1.0, "equals 3: it must depend on x"),
    ],
)
def test_from_expression_refuses(expression: str, radius: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_expression(expression, radius=radius)


def test_from_expression_refuses_what_is_no_text() -> None:
    with pytest.raises(TypeError, match="expression must be a str, got 3"):
        from_expression(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="radius must be a number, got None"):
        from_expression("exp(x)", radius=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expression", "radius", "x", "value", "degree", "coefficient"),
    [
        ("tan(x) + 1", math.pi / 2, 1.0, math.tan(1) + 1, 3, 1 / 3),
        ("(1 - x)**-10", 1.0, 0.5, 1024.0, 2, 55.0),
        ("exp(exp(exp(x)))", math.inf, 0.0, math.exp(math.e), 1, math.exp(math.e) * math.e),
        ("exp(x**2)", math.inf, 2.0, math.exp(4), 8, 1 / 24),
        ("exp(1 / (1 - x))", 1.0, 0.5, math.exp(2), 2, 1.5 * math.e),
        (
            "cosh(sqrt(2) * x) + pi * x + log(2)",
            math.inf,
            1.0,
            math.cosh(2**0.5) + math.pi + math.log(2),
            4,
            1 / 6,
        ),
        ("(1+x)*(1+x**2)*(1+x**4)*(1+x**8)*(1+x**16)*(1+x**32)", math.inf, 1.0, 64.0, 63, 1.0),
        ("1 / (1 - 1000 * x)", 1e-3, 5e-4, 2.0, 40, 1e120),
        ("1 + exp(x) * x**40", math.inf, 1.0, 1 + math.e, 42, 0.5),
        ("1e30 * x + 1 / 3e30", math.inf, 1.0, 1e30, 0, 1 / 3e30),
        ("2 ** +x", math.inf, 3.0, 8.0, 2, math.log(2) ** 2 / 2),
        ("exp(0.1 * x) / (1 - x)", 0.5, 0.25, math.exp(0.025) / 0.75, 1, 1.1),
        ("(1 + x)**200", math.inf, 0.1, 1.1**200, 100, float(math.comb(200, 100))),
    ],
)
def test_from_expression_takes(
    expression: str, radius: float, x: float, value: float, degree: int, coefficient: float
) -> None:
    made = from_expression(expression, radius)
    torch.testing.assert_close(made(torch.tensor([x], dtype=torch.float64)).item(), value, rtol=1e-13, atol=0)
    torch.testing.assert_close(made.coefficients(degree)[degree].item(), coefficient, rtol=2e-15, atol=0)


@pytest.mark.parametrize("power", [6, 7, 9, 15])
def test_from_expression_has_no_degrees_that_do_not_exist(power: int) -> None:
    """Coefficients 512 degrees up fold onto others; 1e-231 of degree 1 would be given features."""
    coefficients = from_expression(f"exp(x**{power})").coefficients(300)
    assert not coefficients[torch.arange(301) % power != 0].any()
    exact = torch.tensor([1 / math.factorial(n) for n in range(300 // power + 1)], dtype=torch.float64)
    torch.testing.assert_close(coefficients[::power], exact, rtol=1e-14, atol=0.0)


def test_from_expression_says_where_its_coefficients_end() -> None:
    with pytest.raises(ValueError, match="known to degree 384, not to 385"):
        from_expression("exp(x)").coefficients(385)
    with pytest.raises(ValueError, match=r"degree 103 .* too large for float64"):
        from_expression("1 / (1 - 1000 * x)", radius=1e-3).coefficients(200)


@settings(deadline=None)  # the first case loads sympy
@given(st.text(alphabet="xyE0123456789.+-*/()[]{}'\"_,:= \n\0^@lambdexpsqrtimo", max_size=12))
def test_no_text_gets_past_the_parser_but_as_a_formula(text: str) -> None:
    from schoenbat.expressions import _parse

    try:
        expression = _parse(text, 0.5)
    except ValueError:
        return
    assert {symbol.name for symbol in expression.free_symbols} == {"x"}


@pytest.mark.parametrize(
    "text",
    ["(((2**384)**384)**384)**384*x", "((1e-9**384)**384)**384 + x", "sin(exp(exp(exp(9*x))))", "exp(1e9)*x"],
)
def test_what_would_be_worked_out_to_its_last_digit_is_refused(text):
    with pytest.raises(ValueError, match="does not fit float64"):
        DotProductKernel.from_expression(text)


@pytest.mark.parametrize("text", ["x" + "+x" * 3000, "(" * 150 + "x" + ")" * 150 + "\0"])
def test_no_text_is_too_much_for_the_parser(text):
    with pytest.raises(
        ValueError, match=r"at most 1,000 characters|nested too deeply|not a formula|null bytes"
    ):
        DotProductKernel.from_expression(text)
