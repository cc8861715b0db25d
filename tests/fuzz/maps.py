"""MaclaurinFeatures and kernels."""

import math
from dataclasses import dataclass

import mpmath
import torch
from hypothesis import strategies as st

from fuzz.cases import DTYPES, KERNELS, LAYOUTS, MAGNITUDES, MAPS, SEEDS, Map, draw_tensor, make_kernel
from fuzz.harness import holds_for, refusal
from schoenbat import DotProductKernel, MaclaurinFeatures, polynomial, reseed


@dataclass(frozen=True)
class Rows:
    map: Map
    head_dim: int
    heads: int
    lead: tuple[int, ...]
    length: int
    dtype: str
    magnitude: float
    layout: str
    seed: int

    def build(self) -> MaclaurinFeatures:
        return self.map.build(self.head_dim, self.heads)

    def tensor(self, more: int = 0) -> torch.Tensor:
        shape = (*self.lead, self.heads, self.length, self.head_dim)
        generator = torch.Generator().manual_seed(self.seed + more)
        return draw_tensor(shape, self.magnitude, getattr(torch, self.dtype), self.layout, generator)


ROWS = st.builds(
    Rows,
    map=MAPS,
    head_dim=st.sampled_from([1, 2, 5, 16]),
    heads=st.integers(1, 3),
    lead=st.lists(st.integers(0, 2), max_size=2).map(tuple),
    length=st.integers(0, 20),
    dtype=st.sampled_from(DTYPES),
    magnitude=MAGNITUDES,
    layout=st.sampled_from(LAYOUTS),
    seed=SEEDS,
)


@holds_for(ROWS, share=6)
def features_are_those_of_the_map_in_float64(case: Rows) -> None:
    features, x = case.build(), case.tensor()
    assert list(features.degrees) == sorted(features.degrees)
    assert len(features.degrees) == case.map.num_features
    # Where a feature is too large for its dtype it is infinite; never NaN, and never wrong.
    got, exact = features(x).detach().double(), features.double()(x.double()).detach()
    assert got.shape == (*x.shape[:-1], case.map.num_features)
    assert not (got.isnan() & exact.isfinite()).any(), "NaN where the oracle is finite"
    dtype = getattr(torch, case.dtype)
    eps, largest = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).max
    size = x.double().abs().sum(-1, keepdim=True) * math.sqrt(max(1, case.head_dim))
    degrees = torch.tensor(features.degrees, dtype=torch.float64)
    weight = features._amplitudes(torch.float64).abs().amax(0).detach() * math.sqrt(2)
    bound = weight * size.pow(degrees)
    error = 4 * eps * (degrees + 1) * (case.head_dim + 2) * bound + 2 * eps * exact.abs()
    error = error + torch.finfo(dtype).tiny * 10 * (1 + weight)
    fits = (bound < torch.finfo(dtype).max / 1e3) & (bound < largest / 1e3)
    wrong = fits & ((got - exact).abs() > error)
    assert not wrong.any(), f"{got[wrong][0]:.9g}, not {exact[wrong][0]:.9g} ± {error[wrong][0]:.2g}"


@holds_for(ROWS, share=2)
def a_map_is_what_was_saved(case: Rows) -> None:
    features, x = case.build(), case.tensor().float()
    other = case.build()
    other.resample(case.seed)
    reseed(other, case.seed)
    other.load_state_dict(features.state_dict())
    assert torch.equal(other(x).nan_to_num(), features(x).nan_to_num())
    assert other.degrees == features.degrees
    if case.map.construction == "exact-low" and case.magnitude < 1e10:
        if x.double().square().any():
            features.calibrate(x, x)
            assert not features(x).isnan().any()
        else:
            assert refusal(lambda: features.calibrate(x, x), "has no directions")
    elif case.map.construction != "exact-low":
        assert refusal(lambda: features.calibrate(x, x), "exact-low")


@dataclass(frozen=True)
class Values:
    kernel: str
    dtype: str
    points: tuple[float, ...]


SHARES = st.one_of(
    st.floats(-0.999, 0.999),
    st.sampled_from([0.0, 1.0, -1.0, 1 - 1e-7, 1 - 1e-15, 1 + 1e-7, 1e-30, -1e-30, 1e30, math.nan, math.inf]),
)


@holds_for(
    st.builds(
        Values, st.sampled_from(KERNELS), st.sampled_from(DTYPES), st.lists(SHARES, max_size=8).map(tuple)
    ),
    5,
)
def kernels_are_their_formulas(case: Values) -> None:
    kernel, dtype = make_kernel(case.kernel), getattr(torch, case.dtype)
    x = torch.tensor(case.points, dtype=torch.float64) * min(kernel.radius, 5.0)
    x = x.to(dtype)
    got, logarithms = kernel(x), kernel.log(x)
    assert got.dtype == dtype
    eps, largest = torch.finfo(dtype).eps, torch.finfo(dtype).max
    for point, value, logarithm in zip(x.tolist(), got.tolist(), logarithms.tolist(), strict=True):
        if math.isnan(point) or point >= kernel.radius:
            assert math.isnan(value) or point >= kernel.radius == math.inf or math.isnan(point)
            continue
        if abs(point) >= kernel.radius or math.isinf(point) or abs(point) > 1e3:
            continue
        exact = formula(case.kernel, point)
        # How far f moves when x moves by a rounding.
        moved = (
            max(abs(formula(case.kernel, point * (1 + sign * 4 * eps)) - exact) for sign in (-1, 1))
            if abs(point) * (1 + 4 * eps) < kernel.radius
            else math.inf
        )
        if abs(exact) < largest / 2:
            assert not math.isnan(value), f"NaN at {point}, where f is {exact}"
            assert abs(value - exact) <= 2 * moved + 16 * eps * (abs(exact) + 1), (point, value, exact)
            if exact > 1e-3:
                error = 2 * moved / exact + 32 * eps * (1 + abs(math.log(exact))) + 16 * eps / min(1.0, exact)
                assert abs(logarithm - math.log(exact)) <= error, (point, logarithm, math.log(exact))


def formula(text: str, x: float) -> float:
    """Written once more, with mpmath."""
    with mpmath.workdps(40):
        x = mpmath.mpf(x)
        name, _, degree = text.partition(" ")
        if name == "polynomial":
            return float((1 + x) ** int(degree))
        return float(
            {
                "exp": lambda: mpmath.exp(x),
                "trigh": lambda: mpmath.sinh(x) + mpmath.cosh(x),
                "inv": lambda: 1 / (1 - x),
                "logi": lambda: 1 - mpmath.log(1 - x),
                "sqrt": lambda: 2 - mpmath.sqrt(1 - x),
                "2 - sqrt(1 - x)": lambda: 2 - mpmath.sqrt(1 - x),
                "cosh(x)": lambda: mpmath.cosh(x),
                "exp(x**2)": lambda: mpmath.exp(x**2),
                "1/(1 - x/2)": lambda: 1 / (1 - x / 2),
            }[text]()
        )


@holds_for(
    st.tuples(st.integers(1, 64), st.one_of(st.floats(0, 10), st.sampled_from([0.0, 1e-30, 1e4]))), share=2
)
def polynomials_are_their_series(case: tuple[int, float]) -> None:
    degree, offset = case
    if degree * math.log10(1 + offset) > 300:
        assert refusal(lambda: polynomial(degree, offset), "float64")
        return
    kernel = polynomial(degree, offset)
    coefficients = kernel.coefficients(degree + 2)
    assert (coefficients >= 0).all()
    assert coefficients[degree] == 1
    assert (coefficients[degree + 1 :] == 0).all()
    x = torch.tensor([0.5, 1.0], dtype=torch.float64)
    series = (coefficients * x[:, None] ** torch.arange(degree + 3)).sum(-1)
    torch.testing.assert_close(kernel(x), series, rtol=1e-9, atol=0)


ATOMS = st.sampled_from(["x", "x", "1", "2", "0.5", "pi", "E", "0", "7", "1e3", "1e-9", "y", "300"])


def _combine(parts):
    return st.one_of(
        st.tuples(parts, st.sampled_from(["+", "-", "*", "/", "**"]), parts).map(" ".join).map("({})".format),
        st.tuples(
            st.sampled_from(
                ["exp", "log", "sqrt", "cosh", "sinh", "tan", "atanh", "cos", "acosh", "abs", "-"]
            ),
            parts,
        ).map(lambda pair: f"{pair[0]}({pair[1]})"),
    )


FORMULAS = st.one_of(
    st.recursive(ATOMS, _combine, max_leaves=6),
    st.text("x0123456789+-*/(). eE", max_size=12),
    st.text(max_size=8),
    st.sampled_from(
        [
            "9**9**9",
            "(((2**384)**384)**384)**384",
            "sin(exp(exp(exp(9*x))))",
            "(" * 500 + "x" + ")" * 500,
            "x" + "+x" * 3000,
            "exp(exp(exp(exp(exp(x)))))",
            "tan(10**384)*x",
            "x\0",
        ]
    ),
)


@holds_for(st.tuples(FORMULAS, st.sampled_from([math.inf, 1.0, 0.5, 2.0, 1e-3, 1e6])), share=1.5)
def a_formula_is_a_kernel_or_refused(case: tuple[str, float]) -> None:
    text, radius = case
    made: list[DotProductKernel] = []
    if refusal(lambda: made.append(DotProductKernel.from_expression(text, radius))) is not None:
        return
    (kernel,) = made
    coefficients = kernel.coefficients(64)
    assert (coefficients >= 0).all()
    x = torch.tensor([0.0, 0.01, -0.01], dtype=torch.float64) * min(radius, 1.0)
    series = (coefficients * x[:, None] ** torch.arange(65)).sum(-1)
    torch.testing.assert_close(kernel(x), series, rtol=1e-6, atol=1e-9 * float(series.abs().max()))
