"""The scaling model of docs/scaling.md: its tables are the script's, its sizes those that were counted."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def scaling():
    specification = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_page_holds_what_the_script_gives(scaling):
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.fill(page, scaling.tables(scaling.rows())) == page
    written = json.loads(scaling.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert written == [vars(row) for row in scaling.rows()]


def test_the_state_is_what_processes_were_seen_to_send(scaling):
    counted = json.loads((RESULTS / "parallel.json").read_text(encoding="utf-8"))
    options = counted["options"]
    layer = scaling.Layer(options["num_heads"], options["head_dim"], options["num_features"])
    sent = {row["sent"] for row in counted["rows"] if row["processes"] > 1}
    assert sent == {2 * scaling.state_bytes(layer) + 8}  # forward and backward; the count is one int64


def test_one_gpu_is_what_was_measured(scaling):
    one, layer = scaling.measured(), scaling.Layer(heads=8)
    rows = json.loads((RESULTS / "nvidia-h200.json").read_text(encoding="utf-8"))["rows"]
    seconds = {
        row["method"]: row["median"]
        for row in rows
        if row["shape"] == scaling.SHAPE and row["direction"] == scaling.BOTH
    }
    row = scaling.model(1, 262_144, layer, scaling.Machine(), one)
    assert row.eager_seconds == pytest.approx(max(seconds["eager"], one.eager_call))
    assert row.fused_seconds == pytest.approx(max(seconds["triton"], one.fused_call))


def test_costs_grow_as_they_should(scaling):
    one, layer, machine = scaling.measured(), scaling.Layer(), scaling.Machine()
    near, far = (scaling.model(64, n, layer, machine, one) for n in (10**8, 10**9))
    assert far.eager_seconds == pytest.approx(10 * near.eager_seconds)
    assert far.ring_seconds == pytest.approx(100 * near.ring_seconds)
    assert (far.sums_seconds, far.prefix_bytes) == (near.sums_seconds, near.prefix_bytes)
    slow = replace(machine, infiniband_bytes_per_second=1e6)
    assert scaling.model(64, 10**6, layer, slow, one).ring_waits
