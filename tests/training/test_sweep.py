"""Sweeps of a stand-in for training: what is run, in which order, how it ends, and what is left behind."""

import _thread
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from schoenbat.data import cache
from schoenbat.data.arrays import consecutive
from schoenbat.training import sweep
from schoenbat.training.cells import Cell, SweepOptions, is_done
from schoenbat.training.protocol import Protocol
from schoenbat.training.record import CHECKPOINT, LOG, RESULT, read_result
from schoenbat.training.sweep import (
    DONE,
    LOCKED,
    Failed,
    Finished,
    OutOfBudget,
    Progressed,
    Skipped,
    Started,
    _last_words,
    parse_duration,
    read_progress,
)

# Trains nothing, but leaves the files that training leaves. The mode is what it does instead of training.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path

directory, task, attention, seed, timing, protocol, mode = sys.argv[1:]
protocol = json.loads(protocol)
steps = protocol["steps"]
directory = Path(directory)
began = time.time()
(directory / "pid").write_text(str(os.getpid()))

def write(path, text):
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)

def save(*_):
    write(directory / "checkpoint.pt", "state")
    sys.exit(143)

signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else save)
with (directory / "log.jsonl").open("a") as log:
    log.write(json.dumps({"step": 1, "loss": 2.5}) + "\\n")
if mode == "fail":
    print("warming up\\nloss is NaN", file=sys.stderr)
    sys.exit(3)
if mode in ("long", "deaf"):
    if mode == "deaf":
        write(directory / "checkpoint.pt", "state")
    (directory / "ready").touch()
    time.sleep(60)
if mode == "short":
    time.sleep(0.5)
if mode != "nothing":
    best = None if timing == "1" else {"step": 1, "validation": 0.5, "test": 0.5}
    row = dict(task=task, attention=attention, seed=int(seed), steps=int(steps), best=best, last=best,
        majority=0.5, parameters=10, seconds=1.0, timed_steps=min(200, steps - 10),
        peak_memory=None, devices=1, alone=True, data="d", revision=None)
    write(directory / "result.json", json.dumps(dict(experiment="lra-train", finished=str(time.time()),
        machine=dict(device="toaster"), options=dict(protocol=protocol), rows=[row])))
    (directory / "times").write_text(f"{began} {time.time()}")
"""


@pytest.fixture
def options(tmp_path):
    def make(tasks=("text",), attentions=("softmax",), **more):
        more = {"train_options": (("steps", "100"),)} | more
        return SweepOptions(tasks, attentions, out=tmp_path / "runs", data=tmp_path, **more)

    return make


@pytest.fixture
def stand_in(tmp_path):
    """A command that runs a cell in the mode of its task, else at once."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def make(options, **modes):
        def command(cell):
            arguments = (cell.directory(options.out), cell.task, cell.attention, cell.seed, int(cell.timing))
            mode = modes.get(cell.task, "quick")
            return [
                sys.executable,
                "-S",
                str(script),
                *map(str, arguments),
                json.dumps(asdict(Protocol.paper(cell.task, steps=options.steps(cell.task)))),
                mode,
            ]

        return command

    return make


def kinds(events, kind):
    return [event for event in events if isinstance(event, kind)]


def started(events):
    return [str(event.cell) for event in kinds(events, Started)]


def wait_for(path, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("9m", 540.0),
        ("1h30m", 5400.0),
        ("2h", 7200.0),
        ("1.5m", 90.0),
        (" 3 ", 3.0),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "9 minutes", "-3", "0", "1d", "m", "30m1h"])
def test_what_is_no_duration_is_explained(text):
    with pytest.raises(ValueError, match="is not a duration; write seconds as 90 or 90s, or 9m, 1h30m"):
        parse_duration(text)


def test_everything_is_run_once(options, stand_in):
    chosen = options(("text", "image"), seeds=2)
    events = list(sweep.run(chosen, stand_in(chosen)))
    assert started(events) == [str(cell) for cell in chosen.cells]
    assert [event.cell for event in kinds(events, Finished)] == chosen.cells
    again = list(sweep.run(chosen, stand_in(chosen)))
    assert again == [Skipped(cell, DONE) for cell in chosen.cells]


def test_a_result_with_another_setting_than_the_published_one_is_not_the_one_asked_for(options, stand_in):
    chosen = options()
    cell = chosen.cells[0]
    list(sweep.run(chosen, stand_in(chosen)))
    path = cell.directory(chosen.out) / RESULT
    path.write_text(path.read_text().replace('"batch_size": 32', '"batch_size": 4'))
    assert not is_done(cell, chosen)
    assert is_done(cell, options(train_options=(("steps", "100"), ("batch-size", "4"))))


def test_the_panel_of_an_error_is_what_a_run_ended_with():
    lines = ["Usage: ...", "╭─ Error ───╮", "│ Invalid   │", "│ value: 3  │", "╰───────────╯"]
    assert _last_words(lines) == "Invalid value: 3"
    assert _last_words(["warming up", "loss is NaN", ""]) == "loss is NaN"
    traceback = ["│ 12 x = y / 0 │", "╰──────────────╯", "ZeroDivisionError: by zero", "see the manual"]
    assert _last_words(traceback) == "ZeroDivisionError: by zero"
    assert _last_words(traceback[:2]) == "12 x = y / 0"


def test_a_result_of_other_options_is_neither_the_one_asked_for_nor_written_over(options, stand_in):
    chosen = options()
    list(sweep.run(chosen, stand_in(chosen)))
    (cell,) = chosen.cells
    before = (cell.directory(chosen.out) / RESULT).read_text()
    longer = options(train_options=(("steps", "200"),))
    (failure,) = sweep.run(longer, stand_in(longer))
    assert "its result has steps 100, not 200; choose another --out, or delete" in failure.message
    assert (cell.directory(chosen.out) / RESULT).read_text() == before
    for more, done in [
        ((("steps", "100"), ("batch-size", "32")), True),
        ((("steps", "100"), ("checkpoint-seconds", "30")), True),
        ((("steps", "100"), ("batch-size", "16")), False),
        ((("steps", "100"), ("learning-rate", "1e-4")), True),
        ((("steps", "100"), ("keep-zeros", "")), False),
        ((("steps", "200"),), False),
        ((), False),
    ]:
        assert is_done(cell, options(train_options=more)) == done, more
    assert not is_done(Cell("text", "softmax", 0, timing=True), chosen)


@pytest.mark.parametrize(("steps", "done"), [("100", False), ("300", True)])
def test_timing_is_done_if_as_many_steps_were_timed(options, stand_in, steps, done):
    timed = options(timing=True, train_options=(("steps", steps),))
    list(sweep.run(timed, stand_in(timed)))
    (cell,) = timed.cells
    assert is_done(cell, timed)
    assert is_done(cell, options(timing=True, train_options=(("steps", "50"),)))
    assert is_done(cell, options(timing=True, train_options=())) == done
    assert read_result(cell.directory(timed.out) / RESULT).timing


def test_a_cell_whose_directory_cannot_be_made_stops_no_other(options, stand_in):
    both = options(attentions=("mean", "softmax"))
    first = both.cells[0].directory(both.out).parent
    first.parent.mkdir(parents=True)
    first.write_text("in the way")
    events = list(sweep.run(both, stand_in(both)))
    (failed,) = (event for event in events if isinstance(event, sweep.Failed))
    assert "cannot be written" in failed.message
    assert any(isinstance(event, sweep.Finished) for event in events)


@pytest.mark.parametrize(
    "damage", ["", '{"experiment": "lra-tr', "[]", '{"experiment": "speed"}', "\x00\x01"]
)
def test_a_damaged_result_counts_as_missing(options, stand_in, damage):
    chosen = options()
    list(sweep.run(chosen, stand_in(chosen)))
    path = chosen.cells[0].directory(chosen.out) / RESULT
    path.write_text(damage)
    with pytest.raises(ValueError, match=r"result.json is not the result of a run"):
        read_result(path)
    assert kinds(sweep.run(chosen, stand_in(chosen)), Finished)


def test_cells_that_were_begun_come_first(options, stand_in):
    chosen = options(("text", "image"), seeds=2)
    begun = Cell("image", "softmax", 1).directory(chosen.out)
    begun.mkdir(parents=True)
    (begun / CHECKPOINT).touch()
    events = list(sweep.run(chosen, stand_in(chosen)))
    assert started(events)[:2] == ["image softmax seed 1", "text softmax seed 0"]
    assert [event.resumed for event in kinds(events, Started)] == [True, False, False, False]


def test_a_failing_cell_is_reported_and_stops_no_other(options, stand_in):
    chosen = options(("text", "image"))
    events = list(sweep.run(chosen, stand_in(chosen, text="fail")))
    (failure,) = kinds(events, Failed)
    assert failure.cell.task == "text"
    assert failure.message == "exit code 3: loss is NaN"
    assert failure.path.read_text() == "warming up\nloss is NaN\n"
    assert [event.cell.task for event in kinds(events, Finished)] == ["image"]
    assert started(events).count("text softmax seed 0") == 1


def test_ending_well_without_a_result_is_a_failure(options, stand_in):
    chosen = options()
    (failure,) = kinds(sweep.run(chosen, stand_in(chosen, text="nothing")), Failed)
    assert failure.message == "no result that agrees with its options: nothing on stderr"


@pytest.mark.parametrize(
    ("jobs", "timing", "overlapping"), [(2, False, True), (1, False, False), (2, True, False)]
)
def test_jobs_run_at_the_same_time(options, stand_in, monkeypatch, jobs, timing, overlapping):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = options(("text", "image"), jobs=jobs, timing=timing)
    list(sweep.run(chosen, stand_in(chosen, text="short", image="short")))
    spans = [(cell.directory(chosen.out) / "times").read_text().split() for cell in chosen.cells]
    (_, first_end), (second_begin, _) = (map(float, span) for span in spans)
    assert (second_begin < first_end) == overlapping


def test_at_the_end_of_the_budget_runs_save_and_end(options, stand_in):
    chosen = options(("text", "image"), budget=4.0)
    began = time.monotonic()
    events = list(sweep.run(chosen, stand_in(chosen, text="long")))
    assert time.monotonic() - began < 4.0
    assert events[-1] == OutOfBudget((chosen.cells[0],), (chosen.cells[1],))
    assert Progressed(chosen.cells[0], 1, 2.5) in events
    assert not kinds(events, Failed)
    assert (chosen.cells[0].directory(chosen.out) / CHECKPOINT).exists()


def test_a_run_that_does_not_listen_is_ended_by_force(options, stand_in):
    chosen = options(budget=3.0)
    began = time.monotonic()
    events = list(sweep.run(chosen, stand_in(chosen, text="deaf")))
    assert 2.0 < time.monotonic() - began < 5.0
    assert events[-1] == OutOfBudget((chosen.cells[0],), ())
    assert not alive(int((chosen.cells[0].directory(chosen.out) / "pid").read_text()))


def test_nothing_starts_once_the_budget_is_spent(options, stand_in):
    chosen = options(budget=1e-9)
    assert list(sweep.run(chosen, stand_in(chosen))) == [OutOfBudget((), (chosen.cells[0],))]


@pytest.mark.parametrize("interruption", ["ctrl-c", "closed"])
def test_an_interrupted_sweep_lets_its_runs_save(options, stand_in, interruption):
    chosen = options()
    directory = chosen.cells[0].directory(chosen.out)
    events = sweep.run(chosen, stand_in(chosen, text="long"))
    assert isinstance(next(events), Started)
    wait_for(directory / "ready")
    if interruption == "ctrl-c":
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            list(events)
    else:
        events.close()
    assert (directory / CHECKPOINT).exists()
    assert not alive(int((directory / "pid").read_text()))


def test_a_cell_that_another_sweep_runs_is_skipped(options, stand_in):
    chosen = options(("text", "image"))
    first = sweep.run(chosen, stand_in(chosen, text="long"))
    with contextlib.closing(first):
        assert isinstance(next(first), Started)
        second = list(sweep.run(chosen, stand_in(chosen)))
    assert second[0] == Skipped(chosen.cells[0], LOCKED)
    assert [event.cell.task for event in kinds(second, Finished)] == ["image"]


def test_a_killed_sweep_is_continued(options, stand_in):
    """Killed, a sweep can end nothing: its run lives on and keeps others off its cell until it is gone."""
    chosen = options(("image", "text"))
    command = [stand_in(chosen, text="deaf")(cell) for cell in chosen.cells]
    program = (
        "from pathlib import Path\nfrom schoenbat.training import cells, sweep\n"
        f"options = cells.SweepOptions(('image', 'text'), ('softmax',), out=Path({str(chosen.out)!r}), "
        f"train_options=(('steps', '100'),))\ncommands = dict(zip(options.cells, {command!r}))\n"
        "list(sweep.run(options, commands.__getitem__))"
    )
    killed = subprocess.Popen([sys.executable, "-c", program])
    image, text = (cell.directory(chosen.out) for cell in chosen.cells)
    try:
        wait_for(text / "ready", 60)
    finally:
        killed.kill()
        killed.wait()
    orphan = int((text / "pid").read_text())
    assert alive(orphan)
    locked = list(sweep.run(chosen, stand_in(chosen)))
    assert locked == [Skipped(chosen.cells[0], DONE), Skipped(chosen.cells[1], LOCKED)]
    os.kill(orphan, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while alive(orphan) and time.monotonic() < deadline:
        time.sleep(0.02)
    events = list(sweep.run(chosen, stand_in(chosen)))
    assert kinds(events, Started) == [Started(chosen.cells[1], resumed=True)]
    assert len(kinds(events, Finished)) == 1
    assert (image / RESULT).exists()


@pytest.mark.parametrize("ending", ["", '{"step": 30, "lo', "12", "\n\n", '"step"'])
def test_a_half_written_line_of_the_log_is_passed_over(options, ending):
    chosen = options()
    (cell,) = chosen.cells
    directory = cell.directory(chosen.out)
    directory.mkdir(parents=True)
    assert read_progress(cell, chosen.out) == Progressed(cell)
    lines = [{"step": 10, "loss": 2.0, "validation": 0.25}, {"step": 20, "loss": 1.5}]
    (directory / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines) + ending)
    assert read_progress(cell, chosen.out) == Progressed(cell, 20, 1.5, 0.25)


def test_a_result_of_other_data_is_not_the_one_asked_for(options, stand_in, tmp_path):
    chosen = options()
    list(sweep.run(chosen, stand_in(chosen)))
    (cell,) = chosen.cells
    arrays = consecutive(
        np.zeros((4, 2), np.uint8), np.ones(4, int), np.arange(4), {"train": 2, "validation": 1, "test": 1}
    )
    manifest = cache.write(tmp_path / "text", arrays, {}, {})
    assert not is_done(cell, chosen)
    path = cell.directory(chosen.out) / RESULT
    path.write_text(path.read_text().replace('"data": "d"', f'"data": "{manifest.fingerprint}"'))
    assert is_done(cell, chosen)


def test_attentions_of_other_names_have_other_directories():
    kernels = ("1+x**2", "1+x/2", "1+x*2", "1+x+2")
    assert (
        len({Cell("text", f"schoenbat:kernel={kernel}", 0).directory(Path("runs")) for kernel in kernels})
        == 4
    )


def test_data_that_cannot_be_read_cost_no_result(options, stand_in, tmp_path):
    chosen = options()
    list(sweep.run(chosen, stand_in(chosen)))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / cache.MANIFEST).write_bytes(b"\xff\xfe\x00{")
    (cell,) = chosen.cells
    assert sweep._clear_result(cell, chosen) == Skipped(cell, DONE)
    assert list(sweep.run(chosen, stand_in(chosen))) == [Skipped(cell, DONE)]
