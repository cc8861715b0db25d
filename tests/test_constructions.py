"""Plans against an allocation done in exact rationals, and the distribution and geometry of what is drawn."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch

from schoenbat.constructions import CONSTRUCTIONS, MAX_DEGREE, Plan, draw
from schoenbat.kernels import DotProductKernel, kernel, polynomial

NAMES = ["exp", "inv", "logi", "trigh", "sqrt"]
from_expression = DotProductKernel.from_expression


def make_plan(construction, kernel_, head_dim, num_features, scale=None, seed=0) -> Plan:
    generator = torch.Generator().manual_seed(seed)
    coefficients = kernel_.coefficients(MAX_DEGREE)
    scale = head_dim**-0.5 if scale is None else scale
    return CONSTRUCTIONS[construction](coefficients, head_dim, num_features, scale, generator)


def weight_of(plan: Plan, degree: int) -> list[float]:
    return [w for n, w in zip(plan.degrees, plan.weights, strict=True) if n == degree]


def rational_coefficients(name: str, count: int) -> list[Fraction]:
    if name in ("exp", "trigh"):
        return [Fraction(1, math.factorial(n)) for n in range(count)]
    if name == "inv":
        return [Fraction(1)] * count
    if name == "logi":
        return [Fraction(1, max(1, n)) for n in range(count)]
    root = [Fraction(1)]  # of 1 - x, by the binomial series
    for n in range(1, count):
        root.append(root[-1] * (Fraction(1, 2) - (n - 1)) / n * -1)
    return [2 - root[0], *(-value for value in root[1:])]


def hamilton(shares: dict[int, Fraction], seats: int) -> dict[int, int]:
    """Largest remainder in exact arithmetic; of two equal remainders, the lower degree's goes first."""
    total = sum(shares.values())
    quotas = {n: seats * share / total for n, share in shares.items()}
    counts = {n: math.floor(quota) for n, quota in quotas.items()}
    order = sorted(quotas, key=lambda n: (counts[n] - quotas[n], n))
    for n in order[: seats - sum(counts.values())]:
        counts[n] += 1
    return {n: count for n, count in counts.items() if count}


def expected_counts(shares: dict[int, Fraction], seats: int, head_dim: int) -> dict[int, int]:
    """Degree 1 has at most d features; what is above goes to the other degrees by the same rule."""
    if not shares or seats <= 0:
        return {}
    if 1 in shares and seats * shares[1] / sum(shares.values()) > head_dim:
        others = {n: share for n, share in shares.items() if n != 1}
        return {1: head_dim, **expected_counts(others, seats - head_dim, head_dim)}
    return hamilton(shares, seats)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("head_dim", "num_features"), [(1, 2), (1, 9), (4, 2), (4, 4), (4, 5), (4, 6), (4, 100), (64, 128)]
)
def test_a_plan_has_one_entry_for_each_feature_in_ascending_degree(
    construction, name, head_dim, num_features
):
    plan = make_plan(construction, kernel(name), head_dim, num_features, scale=0.5)
    assert len(plan.degrees) == len(plan.weights) == num_features
    assert list(plan.degrees) == sorted(plan.degrees)
    assert all(type(n) is int and n >= 0 for n in plan.degrees)
    assert all(w > 0 and math.isfinite(w) for w in plan.weights)


@pytest.mark.parametrize("construction", ["exact-low", "unbiased", "paper-code"])
@pytest.mark.parametrize("name", NAMES)
def test_the_constant_is_exact_except_for_the_paper_s_map(construction, name):
    plan = make_plan(construction, kernel(name), 8, 40, scale=0.5)
    assert sum(weight_of(plan, 0)) == pytest.approx(float(kernel(name).coefficients(0)), rel=1e-15)


def test_exact_low_at_the_default_size_has_64_linear_and_63_pair_features():
    plan = make_plan("exact-low", kernel("exp"), 64, 128)
    assert Counter(plan.degrees) == {0: 1, 1: 64, 2: 63}
    assert plan.exact_linear
    assert plan.directions == 11  # ten complete directions are 55 pairs, the other eight open the eleventh
    assert weight_of(plan, 0) == [1.0]
    assert weight_of(plan, 1) == [1.0] * 64
    # a₂ (Σ yᵢ² zᵢ² + 2 Σ_{i>j} yᵢyⱼzᵢzⱼ), row by row of the lower triangle
    squares = {k * (k + 3) // 2 for k in range(11)}
    assert weight_of(plan, 2) == [0.5 if i in squares else 1.0 for i in range(63)]


@pytest.mark.parametrize(("num_features", "directions"), [(65, 0), (66, 1), (67, 2), (68, 2), (69, 3)])
def test_exact_low_opens_a_direction_when_the_triangle_is_full(num_features, directions):
    plan = make_plan("exact-low", kernel("exp"), 64, num_features)
    assert plan.exact_linear
    assert plan.directions == directions
    assert Counter(plan.degrees)[2] == num_features - 65


@pytest.mark.parametrize("num_features", [2, 10, 64])
def test_exact_low_with_few_features_takes_directions_and_does_not_rescale(num_features):
    plan = make_plan("exact-low", kernel("exp"), 64, num_features)
    assert Counter(plan.degrees) == {0: 1, 1: num_features - 1}
    assert not plan.exact_linear
    assert plan.directions == 0
    # Directions of norm √d: a₁/d each is the identity on their span; a₁/(D-1) would be rescaled.
    assert weight_of(plan, 1) == [1 / 64] * (num_features - 1)


def test_exact_low_spends_what_the_complete_degree_two_leaves_on_an_unbiased_tail():
    head_dim, scale, left = 4, Fraction(1, 2), 64 - 1 - 4 - 10
    plan = make_plan("exact-low", kernel("exp"), head_dim, 64, scale=float(scale))
    counts = Counter(plan.degrees)
    assert (counts[0], counts[1], counts[2], plan.directions) == (1, 4, 10, 4)
    coefficients = rational_coefficients("exp", 60)
    shares = {n: a * scale**n for n, a in enumerate(coefficients) if n > 2}
    expected = expected_counts(shares, left - 1, head_dim)
    sampled = counts - Counter({0: 1, 1: 4, 2: 10, **expected})
    assert sampled.total() == 1
    assert not set(sampled) & set(expected)
    for degree, count in expected.items():
        assert weight_of(plan, degree) == pytest.approx([float(coefficients[degree]) / count] * count)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1 + x**2", {0: 1, 2: 7}),
        ("1 + x + x**3", {0: 1, 1: 5, 3: 2}),
        ("cosh(x)", {0: 1, 2: 7}),
        ("1 + x**3", {0: 1, 3: 7}),
    ],
)
def test_exact_low_spends_on_the_degrees_that_exist(expression, expected):
    assert Counter(make_plan("exact-low", from_expression(expression), 5, 8).degrees) == expected


def test_exact_low_without_odd_degrees_has_an_even_tail():
    plan = make_plan("exact-low", from_expression("cosh(x)"), 3, 40, scale=1.0)
    counts = Counter(plan.degrees)
    assert (counts[0], counts[1], counts[2]) == (1, 0, 6)
    assert counts[4] > 20
    assert all(degree % 2 == 0 for degree in counts)


@pytest.mark.parametrize("construction", ["exact-low", "unbiased"])
@pytest.mark.parametrize(("expression", "head_dim", "needed"), [("1 + x", 5, 5), ("3 + x/2", 1, 1)])
def test_surplus_features_split_the_constant(construction, expression, head_dim, needed):
    plan = make_plan(construction, from_expression(expression), head_dim, 12)
    zeroth = float(from_expression(expression).coefficients(0))
    assert Counter(plan.degrees)[0] == 12 - needed
    assert weight_of(plan, 0) == pytest.approx([zeroth / (12 - needed)] * (12 - needed))


def test_exact_low_splits_the_constant_beyond_a_polynomial_of_degree_two():
    plan = make_plan("exact-low", polynomial(2), 6, 40)
    assert Counter(plan.degrees) == {0: 40 - 6 - 21, 1: 6, 2: 21}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("head_dim", "num_features", "scale"),
    [
        (64, 128, Fraction(1, 8)),
        (64, 128, Fraction(9, 10)),
        (16, 64, Fraction(1, 2)),
        (8, 200, Fraction(1, 3)),
        (32, 17, Fraction(3, 4)),
    ],
)
def test_unbiased_allocation_is_largest_remainder_with_the_linear_part_capped(
    name, head_dim, num_features, scale
):
    plan = make_plan("unbiased", kernel(name), head_dim, num_features, scale=float(scale))
    coefficients = rational_coefficients(name, MAX_DEGREE + 1)
    shares = {n: a * scale**n for n, a in enumerate(coefficients) if n > 0}
    expected = expected_counts(shares, num_features - 2, head_dim)
    sampled = Counter(plan.degrees) - Counter({0: 1, **expected})
    assert sampled.total() == 1
    assert not set(sampled) & set(expected)
    for degree, count in expected.items():
        exact = degree == 1 and count == head_dim
        weight = float(coefficients[degree]) / (1 if exact else count)
        assert weight_of(plan, degree) == pytest.approx([weight] * count, rel=1e-13)


def test_unbiased_allocation_at_the_module_s_default_scale():
    """Poisson(4) degrees: 126 seats in proportion to 4ⁿ/n!, none of them capped."""
    plan = make_plan("unbiased", kernel("exp"), 64, 128, scale=4.0)
    shares = {n: Fraction(4**n, math.factorial(n)) for n in range(1, 100)}
    expected = hamilton(shares, 126)
    assert expected[4] == max(expected.values())
    assert Counter(plan.degrees) - Counter({0: 1, **expected}) == Counter({plan.degrees[-1]: 1})


@pytest.mark.parametrize("num_features", [5, 30])
def test_unbiased_samples_no_degree_where_all_have_features(num_features):
    """(1 + x)² at scale 1 has shares 2 and 1; with d = 30 nothing is capped and nothing left out."""
    seeds = {make_plan("unbiased", polynomial(2), 30, num_features, scale=1.0, seed=s) for s in range(5)}
    assert len(seeds) == 1
    counts = Counter(seeds.pop().degrees)
    assert counts[0] == 1
    assert counts[1] == round((num_features - 1) * 2 / 3)


def test_unbiased_samples_the_degree_left_out_in_proportion_to_its_share():
    """Statistical: the frequency of each degree over 1,000 seeds, at 4.5 standard errors; and
    weight · probability = a_n exactly, which is what makes the map unbiased."""
    seeds, scale = 1000, 0.5
    coefficients = [1 / math.factorial(n) for n in range(60)]
    frequencies: Counter[int] = Counter()
    allocated = expected_counts({n: Fraction(a * scale**n) for n, a in enumerate(coefficients) if n}, 6, 8)
    shares = {n: a * scale**n for n, a in enumerate(coefficients) if n and n not in allocated}
    total = sum(shares.values())
    for seed in range(seeds):
        plan = make_plan("unbiased", kernel("exp"), 8, 8, scale=scale, seed=seed)
        (degree,) = Counter(plan.degrees) - Counter({0: 1, **allocated})
        frequencies[degree] += 1
        (weight,) = weight_of(plan, degree)
        assert weight * shares[degree] / total == pytest.approx(coefficients[degree], rel=1e-12)
    assert len(frequencies) > 1
    for degree, share in shares.items():
        p = share / total
        assert abs(frequencies[degree] - seeds * p) <= 4.5 * math.sqrt(seeds * p * (1 - p)) + 0.5


def test_unbiased_samples_even_degree_one_when_it_was_left_out():
    plans = [make_plan("unbiased", kernel("exp"), 8, 2, scale=0.5, seed=seed) for seed in range(20)]
    assert {1, 2} <= {plan.degrees[1] for plan in plans}
    assert not any(plan.exact_linear for plan in plans)


@pytest.mark.parametrize(("construction", "lowest"), [("paper", 0), ("paper-code", 1)])
@pytest.mark.parametrize("expression", ["exp(x)", "cosh(x)"])
def test_the_paper_s_degrees_are_geometric_over_those_that_exist(construction, lowest, expression):
    """Statistical: frequencies of 20,000 degrees within 4.5 standard errors of ∝ 2^-(n+1)."""
    count = 20_000
    series = from_expression(expression)
    plan = make_plan(construction, series, 4, count + lowest)
    counts = Counter(plan.degrees)
    counts[0] -= lowest
    step = 2 if expression == "cosh(x)" else 1
    exist = range(0 if lowest == 0 else step, 60, step)
    norm = sum(2.0 ** -(n + 1) for n in exist)
    coefficients = series.coefficients(60).tolist()
    for n in range(12):
        p = 2.0 ** -(n + 1) / norm if n in exist else 0.0
        assert abs(counts[n] - count * p) <= 4.5 * math.sqrt(count * p)
        if p and counts[n] and n >= lowest:
            weights = weight_of(plan, n)
            assert weights == pytest.approx([coefficients[n] / (p * count)] * len(weights), rel=1e-12)


def test_the_paper_s_degrees_depend_on_the_seed_only():
    first, again, other = (make_plan("paper", kernel("exp"), 4, 50, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("head_dim", [4, 7])
def test_drawn_directions_are_orthogonal_within_a_degree_and_level(head_dim):
    plan = make_plan("unbiased", kernel("exp"), head_dim, 60, scale=3.0)
    assert not plan.exact_linear or plan.degrees.count(1) == head_dim
    generator = torch.Generator().manual_seed(0)
    linear, quadratic, tail = draw(plan, head_dim, 3, generator)
    in_tail = [n for n in plan.degrees if n > 1]
    assert quadratic.shape == (3, head_dim, 0)
    assert linear.shape[-1] in (0, plan.degrees.count(1))
    assert tail.shape == (3, head_dim, sum(in_tail))
    # Level by level, in each level by degree
    sizes = [
        in_tail.count(degree)
        for level in range(max(in_tail))
        for degree in sorted(set(in_tail))
        if degree > level
    ]
    assert max(sizes) > head_dim, "a frame is full, and another begins"
    for part in tail.split(sizes, dim=-1):
        for frame in part.split(head_dim, dim=-1):
            gram = frame.mT @ frame
            torch.testing.assert_close(gram, head_dim * torch.eye(frame.shape[-1]).double().expand_as(gram))
    first, *others = tail.split(sizes, dim=-1)
    assert not any(torch.equal(first[..., :1], other[..., :1]) for other in others)
    assert not torch.equal(tail[0], tail[1])


def test_drawn_linear_and_quadratic_directions_are_frames():
    linear, _, _ = draw(make_plan("exact-low", kernel("exp"), 8, 6), 8, 2, torch.Generator())
    torch.testing.assert_close(linear.mT @ linear, 8 * torch.eye(5).double().expand(2, 5, 5))
    none, quadratic, tail = draw(make_plan("exact-low", kernel("exp"), 8, 15), 8, 2, torch.Generator())
    assert none.shape == tail.shape == (2, 8, 0)
    torch.testing.assert_close(quadratic.mT @ quadratic, torch.eye(3).double().expand(2, 3, 3))


@pytest.mark.parametrize("construction", ["paper", "paper-code"])
def test_the_paper_s_directions_are_signs(construction):
    """Statistical: the mean of so many fair signs lies within 4.5 standard errors of 0."""
    plan = make_plan(construction, kernel("exp"), 16, 400)
    linear, quadratic, tail = draw(plan, 16, 2, torch.Generator().manual_seed(0))
    signs = torch.cat([linear, tail], dim=-1)
    assert quadratic.shape[-1] == 0
    assert signs.shape[-1] == sum(plan.degrees)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 4.5 / math.sqrt(signs.numel())


def test_frames_are_uniform_and_not_biased_by_the_signs_of_qr():
    """Statistical: E[ω] = 0 and E[ωωᵀ] = I over 4,000 frames, at 4.5 standard errors.

    LAPACK's Q has a fixed sign pattern; without undoing it the mean of the first column is far from 0.
    """
    maps, head_dim = 4000, 4
    plan = make_plan("exact-low", kernel("exp"), head_dim, head_dim)
    linear, _, _ = draw(plan, head_dim, maps, torch.Generator().manual_seed(0))
    assert linear.shape == (maps, head_dim, head_dim - 1)
    # Coordinates have variance 1; ωᵢ² has variance 2(d-1)/(d+2) < 2, and ωᵢωⱼ less
    assert linear.mean(0).abs().max() < 4.5 / math.sqrt(maps)
    outer = torch.einsum("mik,mjk->kij", linear, linear) / maps
    assert (outer - torch.eye(head_dim).double()).abs().max() < 4.5 * math.sqrt(2 / maps)


def test_a_scale_beyond_float32_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"powers of scale 100, up to degree .*, do not fit into float32"):
        make_plan("unbiased", kernel("exp"), 8, 16, scale=100.0)


@pytest.mark.parametrize("num_features", [128, 1024])
def test_a_large_radius_is_planned_as_the_same_kernel_of_radius_1(num_features):
    """aₙ sⁿ are the same numbers; only degrees above 30, of whose powers no map is made, stay out."""
    wide = DotProductKernel.from_expression("1/(1 - x/12)", radius=12.0)
    plan = make_plan("unbiased", wide, 64, num_features, scale=10.8)
    unit = make_plan("unbiased", kernel("inv"), 64, num_features, scale=0.9)
    assert max(plan.degrees) <= 30
    numbers = [(plan.degrees.count(n), unit.degrees.count(n)) for n in range(2, 20)]
    assert all(abs(own - other) <= 1 + 0.1 * other for own, other in numbers)
    assert all(1e-37 < weight < 1e37 for weight in plan.weights)
