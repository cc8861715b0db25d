"""Time and memory of a call."""

import time
from pathlib import Path

import pytest
import torch

from schoenbat.experiments import measurement
from schoenbat.experiments.measurement import available_memory, peak_memory, time_call

CPU = torch.device("cpu")


def test_quantiles_are_in_order_and_the_warm_up_is_not_counted():
    calls = []

    def slow_at_first():
        time.sleep(0.05 if not calls else 0.002)
        calls.append(None)

    timing = time_call(slow_at_first, CPU, seconds=60.0, max_repetitions=5)
    assert len(calls) == 6
    assert timing.repetitions == 5
    assert 0.002 <= timing.low <= timing.median <= timing.high < 0.05


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 3), (60.0, 7)])
def test_repetitions_follow_the_time_and_the_bounds(seconds, expected):
    timing = time_call(lambda: None, CPU, seconds=seconds, max_repetitions=7)
    assert timing.repetitions == expected


@pytest.mark.skipif(not measurement.CLEAR_REFS.exists(), reason="only Linux tells the peak")
def test_peak_memory_sees_what_a_call_holds_and_gives_back():
    def hold():
        torch.ones(64 * 2**20, dtype=torch.uint8)
        torch.ones(32 * 2**20, dtype=torch.uint8)

    memory = peak_memory(hold, CPU)
    assert memory is not None
    assert abs(memory - 64 * 2**20) < 4 * 2**20
    assert peak_memory(lambda: None, CPU) < 2**20


def test_peak_memory_is_none_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(measurement, "CLEAR_REFS", Path("/nowhere/clear_refs"))
    assert peak_memory(lambda: None, CPU) is None


def test_available_memory_is_plausible():
    available = available_memory(CPU)
    assert available is None or 2**20 < available < 2**50
