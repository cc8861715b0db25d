"""Error and speed-up beside the paper's sentences: what holds is counted, not said."""

import itertools
from dataclasses import replace

import pytest

from schoenbat.experiments.error import ErrorRow
from schoenbat.experiments.measurement import PASSES
from schoenbat.experiments.speed import SpeedRow
from schoenbat.report.numerical import error_claims, error_table, length_table, speed_claims, speed_table


def errors_like(error, kernels=("exp", "trigh", "sqrt")):
    grid = itertools.product(kernels, (10, 100, 200), (10, 30, 50))
    return [ErrorRow(k, "paper", d, c, error(k, d, c), 1e-9, 2.0 if c < d else 0.5) for k, d, c in grid]


def test_claims_are_counted():
    claims = dict(error_claims(errors_like(lambda kernel, d, count: d / count)))
    assert claims["the error falls as D rises"] == "in 18 of 18 steps of D"
    assert claims["the error rises with d"] == "in 18 of 18 steps of d"
    assert claims["the approximation is good where D is below d"].endswith("in 0 of 18 cells")
    assert claims["trigh falls the slowest"].endswith("are equal in every cell")
    claims = dict(error_claims(errors_like(lambda kernel, d, count: count / d + 1e-3 * (kernel == "trigh"))))
    assert claims["the error falls as D rises"] == "in 0 of 18 steps of D"
    assert claims["the error rises with d"] == "in 0 of 18 steps of d"
    assert claims["trigh falls the slowest"].endswith("differ by at most 0.001")


def test_kernels_are_ranked_by_their_average():
    size = {"exp": 0.2, "trigh": 0.3, "sqrt": 0.1}
    claims = dict(error_claims(errors_like(lambda kernel, d, count: size[kernel])))
    ranking = claims["it is smallest for exp, larger for logi and trigh"]
    assert ranking == "averages over the grid: sqrt 0.1, exp 0.2, trigh 0.3"


def test_other_maps_make_no_claims():
    rows = [replace(row, construction="unbiased") for row in errors_like(lambda *_: 1.0)]
    assert error_claims(rows) == []
    assert "| unbiased | exp | 1 (0.5) | 1 (0.5) | 1 (2) |" in error_table(rows)


def test_a_cell_that_was_not_measured_is_empty():
    rows = errors_like(lambda *_: 1.0)
    rest = [row for row in rows if (row.kernel, row.head_dim, row.num_features) != ("exp", 10, 50)]
    assert "| paper | exp | 1 (0.5) | – |" in error_table(rest)


@pytest.fixture
def grid():
    rows = []
    for length, direction in itertools.product((1000, 5000), PASSES):
        rows.append(SpeedRow("sdpa", None, length, None, direction, length**2 / 1e7))
        for kernel in ("exp", "logi"):
            rows.append(SpeedRow("exact", kernel, length, None, direction, length**2 / 1e6))
            rows += [
                SpeedRow("rmfa", kernel, length, count, direction, length * count / 1e6)
                for count in (2, 40, 120)
            ]
    return rows


def test_speed_ups_stand_for_both_passes(grid):
    lines = speed_table(grid).splitlines()
    assert lines[0].startswith(
        "| kernel | n | over exact, D = 2 | over exact, D = 40 | over exact, D = 120 |"
    )
    assert "| exp | 1,000 | 500.0 / 500.0 | 25.0 / 25.0 | 8.3 / 8.3 | 50.0 / 50.0 |" in lines[2]
    claims = dict(speed_claims(grid))
    steps = {"the speed-up rises with n": "6 of 6 steps of n", "it falls as D rises": "8 of 8 steps of D"}
    for sentence, found in steps.items():
        assert claims[sentence] == f"forward: in {found}; forward+backward: in {found}"


def test_a_rival_that_was_left_out_is_no_figure(grid):
    rows = [
        replace(row, median=None) if row.method == "exact" and row.length == 5000 else row for row in grid
    ]
    assert "| exp | 5,000 | – / – | – / – | – / – |" in speed_table(rows)
    assert dict(speed_claims(rows))["the speed-up rises with n"].endswith("in 0 of 0 steps of n")
    assert speed_claims([row for row in rows if row.method != "exact"]) == []


def test_lengths_beside_sdpa(speeds):
    lines = length_table(speeds, {"num_heads": 8, "head_dim": 64}).splitlines()
    sdpa, rmfa = (memory / (4 * 8 * 1000 * 64 * 4) for memory in (2**35, 3 * 2**20))
    assert lines[2] == f"| 1,000 | forward | 500.0 | 5.0 | 100.0 × | {sdpa:.2f} | {rmfa:.2f} |"
    assert lines[4].startswith("| 131,072 | forward |  | 5.0 |  |")
