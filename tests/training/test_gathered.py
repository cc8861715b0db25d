"""Results of many runs in one file."""

import json
from dataclasses import asdict, replace

import pytest
from run_records import RECORD

from schoenbat.report.results import write_results
from schoenbat.training.cells import SweepOptions
from schoenbat.training.gathered import gather, read_runs
from schoenbat.training.protocol import Protocol
from schoenbat.training.record import EXPERIMENT, RESULT, Accuracy, read_result, run_directory
from schoenbat.training.sweep import DONE, Skipped, run


def leave(directory, **changes):
    """The result file of a run."""
    record = replace(RECORD, **changes)
    steps = Protocol.paper(record.task).steps if record.best is None else record.steps
    options = {
        "task": record.task,
        "attention": record.attention,
        "seed": record.seed,
        "protocol": asdict(Protocol.paper(record.task, steps=steps)),
    }
    timing = record.best is None
    where = run_directory(directory, record.task, record.attention, record.seed, timing=timing)
    write_results(where / RESULT, EXPERIMENT, options, [record])
    return where / RESULT


def test_what_is_gathered_is_what_the_runs_left(tmp_path):
    runs = [
        read_result(leave(tmp_path / "runs", seed=seed, attention=attention))
        for attention in ("schoenbat", "softmax")
        for seed in (0, 1)
    ]
    assert gather(tmp_path / "runs", tmp_path / "lra.json") == (4, 4)
    assert read_runs(tmp_path / "lra.json") == (runs, [])
    assert read_runs(tmp_path / "runs") == (runs, [])


def test_gathering_twice_changes_nothing(tmp_path):
    leave(tmp_path / "runs")
    gather(tmp_path / "runs", tmp_path / "lra.json")
    before = (tmp_path / "lra.json").read_bytes()
    assert gather(tmp_path / "runs", tmp_path / "lra.json") == (0, 1)
    assert (tmp_path / "lra.json").read_bytes() == before


def test_what_was_gathered_elsewhere_is_added(tmp_path):
    for place, seed in (("here", 0), ("there", 1)):
        leave(tmp_path / place, seed=seed)
        gather(tmp_path / place, tmp_path / f"{place}.json")
    assert gather(tmp_path / "there.json", tmp_path / "here.json") == (1, 2)
    assert [run.record.seed for run in read_runs(tmp_path / "here.json")[0]] == [0, 1]


def test_later_results_take_the_place_of_earlier_ones_and_others_stay(tmp_path):
    path = leave(tmp_path / "first", best=Accuracy(80, 0.7, 0.6))
    earlier = json.loads(path.read_text()) | {"finished": "2001-01-01T00:00:00"}
    path.write_text(json.dumps(earlier))
    leave(tmp_path / "first", best=None, last=None, steps=210)
    gather(tmp_path / "first", tmp_path / "lra.json")
    leave(tmp_path / "second", best=Accuracy(80, 0.7, 0.9))
    leave(tmp_path / "second", task="image")
    leave(tmp_path / "third", steps=500)
    assert gather(tmp_path / "second", tmp_path / "lra.json") == (2, 3)
    assert gather(tmp_path / "first", tmp_path / "lra.json") == (0, 3)
    assert gather(tmp_path / "third", tmp_path / "lra.json") == (1, 4)
    text = [run for run in read_runs(tmp_path / "lra.json")[0] if run.record.task == "text"]
    assert {run.record.best.test for run in text if run.record.best} == {0.9, 0.6}


def test_a_sweep_leaves_out_what_is_known(tmp_path):
    leave(tmp_path / "runs", task="text")
    leave(tmp_path / "runs", task="image", best=None, last=None, steps=210)
    leave(tmp_path / "runs", task="listops", steps=500)
    leave(tmp_path / "runs", task="pathfinder", best=Accuracy(80, 0.7))
    gather(tmp_path / "runs", tmp_path / "lra.json")
    options = SweepOptions(
        ("text", "image", "listops", "pathfinder"),
        ("softmax",),
        out=tmp_path / "new",
        known=tmp_path / "lra.json",
    )
    events = run(options, lambda cell: ["false"])
    skipped = [event.cell.task for event in events if isinstance(event, Skipped) and event.reason == DONE]
    assert skipped == ["text"]


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "lra.json").write_text('{"experiment": "lra-train-runs"')
    with pytest.raises(ValueError, match=r"lra\.json does not hold the results of runs"):
        read_runs(tmp_path / "lra.json")
    (tmp_path / "lra.json").write_text('{"experiment": "speed", "runs": []}')
    with pytest.raises(ValueError, match="its experiment is 'speed'"):
        gather(leave(tmp_path / "runs").parent, tmp_path / "lra.json")


def test_an_accuracy_that_is_no_number_is_named(tmp_path):
    path = leave(tmp_path / "runs")
    path.write_text(path.read_text().replace('"test": 0.6', '"test": "y"'))
    with pytest.raises(ValueError, match="an accuracy is a number"):
        read_result(path)


def test_runs_of_another_precision_or_of_other_data_stay(tmp_path):
    leave(tmp_path / "first")
    gather(tmp_path / "first", tmp_path / "lra.json")
    leave(tmp_path / "second", data="def")
    path = leave(tmp_path / "third")
    other = json.loads(path.read_text())
    other["options"]["precision"] = "32-true"
    path.write_text(json.dumps(other))
    assert gather(tmp_path / "second", tmp_path / "lra.json") == (1, 2)
    assert gather(tmp_path / "third", tmp_path / "lra.json") == (1, 3)
