"""The speed experiment: which cells it measures, what it leaves out, and the crossover."""

from dataclasses import replace

import pytest
import torch

from schoenbat.experiments import speed
from schoenbat.experiments.measurement import BACKWARD, FORWARD, make_call
from schoenbat.experiments.speed import SpeedOptions, SpeedRow, crossover, speedup

TINY = SpeedOptions(
    kernels=("exp", "inv"), lengths=(8, 16), num_features=(4,), head_dim=4, num_heads=2, seconds=0.0
)


def test_one_row_for_every_combination():
    rows = list(speed.run(TINY))
    assert len(rows) == TINY.total == 2 * 2 * (1 + 2 * (1 + 1))
    cells = {(row.method, row.kernel, row.length, row.num_features, row.direction) for row in rows}
    assert len(cells) == len(rows)
    for row in rows:
        assert 0 < row.low <= row.median <= row.high
        assert row.repetitions >= 3
        assert (row.num_features is None) == (row.method != "rmfa")
        assert (row.kernel is None) == (row.method == "sdpa")


def test_rivals_over_budget_are_left_out_from_there_on_and_never_guessed():
    rows = list(speed.run(replace(TINY, kernels=("exp",), lengths=(8, 16, 32), budget=0.0)))
    for row in rows:
        measured = row.method == "rmfa" or row.length == 8
        assert (row.median is not None) == measured
        assert row.repetitions >= 3 if measured else row.repetitions == 0


def test_exact_attention_that_would_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(speed, "available_memory", lambda device: 6 * 2 * 10 * 10 * 4)
    rows = list(speed.run(replace(TINY, kernels=("inv",))))
    left_out = {(row.method, row.length) for row in rows if row.median is None}
    assert left_out == {("exact", 16)}


def test_backward_reaches_query_key_and_value():
    seen = []

    def attention(query, key, value):
        for x in (query, key, value):
            x.register_hook(lambda gradient: seen.append(gradient.shape))
        return query + key + value

    make_call(BACKWARD, attention, speed._draw_inputs(TINY, 8, torch.device("cpu")))()
    assert seen == [(1, 2, 8, 4)] * 3


def test_long_mode_is_powers_of_two():
    options = SpeedOptions.long()
    assert options.lengths == (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    assert options.rivals == ("sdpa",)
    assert SpeedOptions.long(longest=1024).lengths == (256, 512, 1024)


def rows_with(times):
    """RMFA takes one second at each length; SDPA what is given."""
    rows = []
    for length, seconds in times.items():
        rows.append(SpeedRow("sdpa", None, length, None, FORWARD, seconds))
        rows.append(SpeedRow("rmfa", "exp", length, 128, FORWARD, 1.0))
    return rows


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({256: 0.5, 512: 2.0, 1024: 8.0}, 512),
        ({256: 0.5, 512: 2.0, 1024: 8.0, 2048: None}, 512),
        ({256: 2.0, 512: 0.9, 1024: 8.0}, 1024),
        ({256: 2.0, 512: 4.0}, 256),
        ({256: 2.0, 512: 0.9}, None),
        ({256: None}, None),
    ],
)
def test_crossover_is_where_rmfa_begins_to_stay_faster(times, expected):
    assert crossover(rows_with(times), "exp", FORWARD) == expected
    assert crossover(rows_with(times), "exp", BACKWARD) is None
    assert crossover(rows_with(times), "inv", FORWARD) is None


def test_speedup_compares_the_same_input():
    rows = [
        SpeedRow("exact", "exp", 8, None, FORWARD, 3.0),
        SpeedRow("exact", "inv", 8, None, FORWARD, 5.0),
        SpeedRow("exact", "inv", 16, None, FORWARD, None),
        SpeedRow("sdpa", None, 8, None, FORWARD, 1.0),
    ]
    ours = SpeedRow("rmfa", "inv", 8, 32, FORWARD, 2.0)
    assert speedup(rows, ours, "exact") == 2.5
    assert speedup(rows, ours, "sdpa") == 0.5
    assert speedup(rows, replace(ours, length=16), "exact") is None
    assert speedup(rows, replace(ours, direction=BACKWARD), "sdpa") is None


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="'cuda:1' was asked for, but PyTorch sees no GPU"):
        SpeedOptions(device="cuda:1")


@pytest.mark.gpu
def test_widths_that_are_no_power_of_two_are_timed_on_a_gpu():
    options = SpeedOptions.quick(kernels=("inv",), lengths=(300,), num_features=(10, 120), device="cuda")
    rows = list(speed.run(options))
    assert len(rows) == options.total
    assert all(0 < row.low <= row.median <= row.high and row.memory > 0 for row in rows)
