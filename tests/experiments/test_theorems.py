"""The theorems' checks: that each sees what it looks for, and does not see what is not there."""

import math

import pytest
import torch

from schoenbat.experiments.theorems import TheoremOptions, restoring, run
from schoenbat.experiments.theorems.bias import QUANTITIES, BiasRow, decay, measure_bias, squared_bias
from schoenbat.experiments.theorems.estimates import draw_inputs, estimate, exact, normalised
from schoenbat.experiments.theorems.kernels import compare_kernels
from schoenbat.experiments.theorems.restoring import METHODS, evaluate_formula, restore
from schoenbat.experiments.theorems.tail import bound, informative_from, measure_pair, measure_rows
from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import kernelized_attention, rmfa


@pytest.fixture(scope="module")
def inputs():
    return normalised(draw_inputs(seed=0, num_tokens=12, head_dim=8))


@pytest.fixture(scope="module")
def biases(inputs):
    sizes = {"heads": 16, "draws": 150, "seed": 0}
    rows = [
        row
        for construction in ("paper", "unbiased")
        for count in (16, 64)
        for row in measure_bias(inputs, construction, count, **sizes)
    ]
    return {(row.construction, row.num_features, row.quantity): row for row in rows}


def test_the_estimate_without_its_floor_is_rmfa(inputs):
    features = MaclaurinFeatures(8, 64, construction="exact-low", num_heads=3, seed=1, dtype=torch.float64)
    query, key, value = (x.expand(3, -1, -1) for x in inputs)
    torch.testing.assert_close(estimate(features, inputs).ratio, rmfa(query, key, value, features))


@pytest.mark.parametrize("kernel", ["exp", "sqrt"])
def test_the_exact_sums_give_kernelized_attention(inputs, kernel):
    torch.testing.assert_close(exact(inputs, kernel).ratio, kernelized_attention(*inputs, kernel=kernel))


def test_numerator_and_denominator_are_unbiased(biases):
    for (_, _, quantity), row in biases.items():
        if quantity in ("numerator", "denominator"):
            assert row.z < 5
            assert abs(row.along) < 5 * row.along_standard_error


@pytest.mark.parametrize("construction", ["paper", "unbiased"])
def test_their_ratio_is_biased_and_the_less_the_more_features(biases, construction):
    few, many = (biases[construction, count, "ratio"] for count in (16, 64))
    assert few.significant
    assert many.bias < few.bias / 2


def test_the_bias_of_the_ratio_makes_attention_too_sharp(biases):
    """With the paper's map 1/D of it is the variance of the constant alone."""
    row = biases["paper", 64, "ratio"]
    assert row.along > 3 * row.along_standard_error
    assert 0.5 / 64 < row.along < 4 / 64


def test_an_average_of_outputs_has_the_bias_that_was_measured(inputs, biases):
    """Without the control variate, from other maps."""
    attention, errors = kernelized_attention(*inputs), []
    signal = attention - inputs.value.mean(0)
    for seed in range(400):
        features = MaclaurinFeatures(
            8, 16, construction="paper", num_heads=16, seed=10_000 + seed, dtype=torch.float64
        )
        errors.append((estimate(features, inputs).ratio - attention).mean(0))
    along = (torch.stack(errors) * signal).sum((1, 2)) / signal.square().sum()
    standard_error = along.std() / math.sqrt(len(along))
    row = biases["paper", 16, "ratio"]
    assert abs(along.mean() - row.along) < 4 * (standard_error**2 + row.along_standard_error**2) ** 0.5


def test_a_squared_bias_has_no_noise_in_it():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(500, 4, 5, generator=generator)
    squared, standard_error = squared_bias(noise)
    assert abs(squared) < 4 * standard_error
    squared, standard_error = squared_bias(noise + 0.3)
    assert abs(squared - 20 * 0.3**2) < 4 * standard_error
    assert squared > 10 * standard_error


def test_decay_takes_the_last_significant_biases_alone():
    def row(count, bias, z):
        return BiasRow("bias", "paper", 8, count, 10, "ratio", bias, 0.1, z, 0.0, 1.0, 0.0)

    last = [row(count, 64 / count**2, z=9) for count in (16, 32, 64, 128)]
    rows = [row(8, 500.0, z=9), *last, row(256, 0.7, z=1)]
    assert decay(rows, "paper", "ratio") == pytest.approx((-2, 64, 128))
    assert decay(rows[-2:], "paper", "ratio") is None
    assert decay(rows, "paper", "rmfa") is None


def test_the_bound_at_a_point_computed_by_hand():
    # 2 · 100 · exp(−100 · 0.5² / (2 · 2² · 1²)) = 200 · exp(−3.125)
    assert bound(100, 0.5, 1, value_bound=2.0) == pytest.approx(200 * 0.0439369336)
    assert bound(100, 0.5, 2) == bound(100, 0.5, 1, value_bound=2.0)


@pytest.mark.parametrize(("epsilon", "head_dim"), [(0.1, 32), (1.0, 16), (2.0, 1), (10.0, 1)])
def test_the_bound_is_informative_from_where_it_says(epsilon, head_dim):
    first = informative_from(epsilon, head_dim)
    assert bound(first, epsilon, head_dim) < 1
    assert bound(10 * first, epsilon, head_dim) < 1
    assert first == 1 or bound(first - 1, epsilon, head_dim) >= 1


def test_tails_count_entries_and_maps(inputs):
    small, large = measure_rows(inputs, 8, (0.01, 1e9), heads=4, draws=5, seed=0)
    assert small.maps == 20
    assert 0 < small.entry <= small.any_entry <= 1
    assert (large.entry, large.any_entry, large.averaging) == (0, 0, 0)
    attention = kernelized_attention(*inputs)
    off = (attention - inputs.value.mean(0)).abs() > 0.01
    assert small.averaging == pytest.approx(off.double().mean().item())


def test_errors_of_random_rows_are_far_below_the_bound(inputs):
    (row,) = measure_rows(inputs, 2048, (1.0,), heads=2, draws=5, seed=0)
    assert row.num_features > row.informative_from
    assert row.entry == 0


def test_the_pair_breaks_the_bound():
    (row,) = measure_pair(256, (1.0,), draws=300, seed=0)
    assert row.bound < 1e-50
    assert row.entry > 0.02


def test_trigh_is_exp_and_no_other_kernel_is(inputs):
    rows = list(compare_kernels(inputs, 0.5))
    assert {(row.kernel, row.other) for row in rows if row.equal} == {("exp", "trigh")}
    assert all((row.of_signal == 0) == row.equal for row in rows)


def test_at_a_small_scale_kernels_differ_by_their_slope_alone(inputs):
    rows = {(row.kernel, row.other): row.of_signal for row in compare_kernels(inputs, 0.01)}
    assert rows["exp", "averaging"] == pytest.approx(1)
    assert rows["exp", "inv"] < 0.01
    assert rows["exp", "sqrt"] == pytest.approx(0.5, rel=0.01)
    assert rows["sqrt", "exp(x/2)"] < 1e-4


def test_the_formula_is_off_by_about_the_number_of_keys():
    # Were all logits 0, it would give m^(1/d) / m for m keys; those drawn come close to it.
    for row in evaluate_formula(64, (2, 8, 32), seed=0):
        count = row.num_tokens
        assert row.right_side == pytest.approx(count ** (1 / 64) / count, rel=0.1)


def test_more_freedom_restores_more_and_the_scale_most():
    rows = {(row.values, row.method): row.residual for row in restore(draw_inputs(0, 48, 8))}
    for values in ("signed", "positive"):
        unchanged, factor, power, scale = (rows[values, method] for method in METHODS)
        assert scale < power < factor < unchanged


def test_the_fit_of_a_power_finds_it_in_each_channel():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, dtype=torch.float64, generator=generator)
    wanted = x.sign() * x.abs() ** torch.tensor([0.4, 3.0], dtype=torch.float64) * torch.tensor([5.0, -0.1])
    fitted = restoring._best_power(x, wanted)
    assert (fitted - wanted).norm() < 0.01 * wanted.norm()


def test_every_row_is_announced_and_the_seed_decides():
    options = TheoremOptions.quick(
        num_features=(8,), draws=3, tail_features=(8,), pair_features=(8,), pair_draws=3, kernel_tokens=16
    )
    rows = list(run(options))
    assert len(rows) == options.total
    assert rows == list(run(options))
    assert {row.quantity for row in rows if row.check == "bias"} == set(QUANTITIES)


def test_two_draws_have_no_standard_error():
    with pytest.raises(ValueError, match="at least 3 draws, got 2"):
        TheoremOptions(draws=2)
