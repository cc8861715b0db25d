"""The error experiment: its inputs, its two measures, its repetitions."""

from dataclasses import replace

import pytest
import torch

from schoenbat.constructions import CONSTRUCTIONS
from schoenbat.experiments import error
from schoenbat.experiments.error import ErrorOptions
from schoenbat.features import MaclaurinFeatures
from schoenbat.functional import rmfa

TINY = ErrorOptions(("exp", "sqrt"), head_dims=(6, 8), num_features=(4, 12), num_tokens=20, repetitions=12)


def test_one_row_for_every_combination():
    rows = list(error.run(TINY))
    assert len(rows) == TINY.total == 2 * len(CONSTRUCTIONS) * 2 * 2
    cells = {(row.kernel, row.construction, row.head_dim, row.num_features) for row in rows}
    assert len(cells) == len(rows)
    assert {row.construction for row in rows} == set(CONSTRUCTIONS)
    assert all(row.error > 0 and row.standard_error > 0 for row in rows)


def test_inputs_are_normalised_by_token():
    query, key, value = error._draw_inputs(TINY, 6)
    assert query.shape == (12, 20, 6)
    for x in (query, key):
        torch.testing.assert_close(x.mean(-1), torch.zeros(12, 20), atol=1e-6, rtol=0)
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(12, 20))
    assert 0.9 < value.std() < 1.1


@pytest.mark.parametrize("kernel", ["exp", "inv"])
def test_both_errors_are_what_they_say(kernel):
    options = ErrorOptions((kernel,), ("unbiased",), (6,), (12,), num_tokens=20, repetitions=2)
    (row,) = error.run(options)
    query, key, value = (x.double() for x in error._draw_inputs(options, 6))
    scores = {"exp": torch.exp, "inv": lambda x: 1 / (1 - x)}[kernel](query @ key.mT / 6**0.5)
    exact = scores @ value / scores.sum(-1, keepdim=True)
    approximate = []
    for i in range(2):
        features = MaclaurinFeatures(6, 12, kernel, construction="unbiased", num_heads=1, seed=10**6 + i)
        rows = query[[i]], key[[i]], value[[i]]
        approximate += [rmfa(*rows, features.double(), implementation="reference")]
    first, second = ((torch.cat(approximate) - exact).abs().mean((1, 2))).tolist()
    averaging = (exact - value.mean(1, keepdim=True)).abs().mean().item()
    assert row.error == pytest.approx((first + second) / 2, rel=1e-3)
    assert row.standard_error == pytest.approx(abs(first - second) / 2, rel=1e-3)
    assert row.relative == pytest.approx((first + second) / 2 / averaging, rel=1e-3)


def test_every_repetition_has_a_map_of_its_own():
    """Equal inputs in all repetitions still give different outputs."""
    query, key, value = (x[:1].expand(12, -1, -1) for x in error._draw_inputs(TINY, 6))
    outputs = error._approximate(query, key, value, "exp", "paper", 12, seed=0)
    assert outputs.shape == (12, 20, 6)
    distances = torch.cdist(outputs.flatten(1), outputs.flatten(1))
    assert (distances + torch.eye(12)).min() > 1e-4


def test_the_standard_error_is_that_of_means_over_maps():
    """The heads of a "paper" map share their degrees: one seed's error is off by what all of them have."""
    options = ErrorOptions(("exp",), ("paper",), (10,), (10,), num_tokens=20, repetitions=100)
    rows = [next(error.run(replace(options, seed=seed))) for seed in range(12)]
    deviation = torch.tensor([row.error for row in rows]).std().item()
    told = sum(row.standard_error for row in rows) / len(rows)
    assert 0.5 < told / deviation < 2


def test_the_seed_decides():
    one = replace(TINY, kernels=("exp",), head_dims=(6,))
    assert list(error.run(one)) == list(error.run(one))
    assert list(error.run(one)) != list(error.run(replace(one, seed=1)))


def test_more_features_and_better_constructions_have_less_error():
    options = ErrorOptions(("exp",), head_dims=(10,), num_features=(10, 50), repetitions=20)
    relative = {(row.construction, row.num_features): row.relative for row in error.run(options)}
    assert relative["exact-low", 50] < relative["exact-low", 10]
    assert relative["paper", 50] < relative["paper", 10]
    assert relative["exact-low", 50] < relative["unbiased", 50] < relative["paper", 50]


def test_one_repetition_has_no_standard_error():
    with pytest.raises(ValueError, match="at least 2 repetitions, got 1"):
        ErrorOptions(repetitions=1)


def test_an_unknown_kernel_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="foo"):
        ErrorOptions(kernels=("exp", "foo"))
