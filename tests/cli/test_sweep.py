"""The commands over many runs: what they print, write and end with, with a stand-in for training."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from schoenbat import files
from schoenbat.cli.sweep import _train_options, app
from schoenbat.data import catalogue
from schoenbat.experiments.groups import GROUPS
from schoenbat.report.results import write_results
from schoenbat.training import sweep
from schoenbat.training.record import CHECKPOINT, RESULT, Accuracy, RunRecord, run_directory


def record(task, attention, seed, steps=10, timing=False):
    accuracy = None if timing else Accuracy(steps, 0.6, 0.625)
    return RunRecord(
        task, attention, seed, steps, accuracy, accuracy, 0.5, 100, 2.0, 200, 2**20, 1, True, "d", None
    )


def write_run(out, task, attention, seed=0, timing=False):
    directory = run_directory(out, task, attention, seed, timing=timing)
    row = record(task, attention, seed, timing=timing)
    write_results(directory / RESULT, "lra-train", {"steps": 10}, [row])


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "100"})


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Training that leaves a finished run's result; with the attention none it fails, with mean it waits."""
    finished = tmp_path / "finished"
    for task in ("text", "image"):
        for seed in range(2):
            write_run(finished, task, "softmax", seed)
        write_run(finished, task, "softmax", timing=True)
    script = tmp_path / "train.py"
    script.write_text(
        "import shutil, signal, sys, time\n"
        "attention, source, directory = sys.argv[1:]\n"
        "def save(*_):\n"
        f"    open(directory + '/{CHECKPOINT}', 'w').close()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(directory + '/log.jsonl', 'w').write('{\"step\": 3, \"loss\": 1.5}\\n')\n"
        "if attention == 'mean': time.sleep(60)\n"
        "if attention == 'none': sys.exit('no mixing, no luck')\n"
        "shutil.copy(source, directory)\n"
    )

    def command(cell, options):
        paths = (cell.directory(finished) / RESULT, cell.directory(options.out))
        return [sys.executable, "-S", str(script), cell.attention, *map(str, paths)]

    monkeypatch.setattr(sweep, "train_command", command)
    monkeypatch.setattr(catalogue, "require", lambda task, root: None)


@pytest.mark.parametrize("command", ["sweep", "table"])
def test_help_shows_an_example(invoke, command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: schoenbat lra {command}" in result.output
    assert max(map(len, result.output.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--attentions", "softmax,foo"], "unknown attention 'foo'"),
        (["--attentions", "softmax", "--tasks", "text,txt"], "unknown task 'txt'"),
        (["--attentions", "softmax", "--budget", "soon"], "not a duration"),
        (["--attentions", "softmax", "--train-option", "steps"], "steps=1000"),
        (["--attentions", "softmax", "--jobs", "0"], "at least 1 job"),
        (["--attentions", "softmax", "--timing", "--train-option", "steps=10"], "--timing needs more"),
        ([], "--attentions"),
    ],
)
def test_wrong_options_are_named_without_a_traceback(invoke, tmp_path, arguments, problem):
    result = invoke("sweep", "--out", tmp_path / "runs", *arguments)
    assert result.exit_code == 2
    assert problem in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def run_sweep(invoke, tmp_path, *arguments):
    return invoke("sweep", "--out", tmp_path / "runs", "--train-option", "steps=10", *arguments)


@pytest.mark.usefixtures("stand_in")
def test_a_sweep_tells_what_it_did_and_what_was_done(invoke, tmp_path):
    arguments = ("--tasks", "text,image", "--attentions", "softmax", "--seeds", 2, "--jobs", 2)
    first = run_sweep(invoke, tmp_path, *arguments)
    assert first.exit_code == 0, first.output
    assert "started: text softmax seed 0" in first.output
    assert "finished: image softmax seed 1 in" in first.output
    assert "cells: 4 finished, 0 failed, 0 skipped, of 4" in first.output
    second = run_sweep(invoke, tmp_path, *arguments)
    assert "cells: 0 finished, 0 failed, 4 skipped, of 4" in second.output


@pytest.mark.usefixtures("stand_in")
def test_runs_of_the_file_that_do_not_count_are_told(invoke, tmp_path):
    arguments = ("--tasks", "text", "--attentions", "softmax")
    run_sweep(invoke, tmp_path, *arguments)
    gathered = invoke("gather", "--runs", tmp_path / "runs", "--into", tmp_path / "known.json")
    assert "runs: 1 new or renewed, 1 in the file" in gathered.output
    elsewhere = ("--out", tmp_path / "other", "--known", tmp_path / "known.json", *arguments)
    known = invoke("sweep", *elsewhere, "--train-option", "steps=10")
    assert "not count" not in known.output
    assert "1 skipped, of 1" in known.output
    longer = " ".join(invoke("sweep", *elsewhere, "--train-option", "steps=20").output.split())
    assert "1 run of" in longer
    assert "does not count: steps 10, not 20" in longer


@pytest.mark.usefixtures("stand_in")
def test_what_is_missing_is_found_out_once(invoke, tmp_path, monkeypatch):
    asked, look = [], sweep.is_done
    monkeypatch.setattr(sweep, "is_done", lambda cell, options: asked.append(cell) or look(cell, options))
    run_sweep(invoke, tmp_path, "--tasks", "text", "--attentions", "softmax")
    asked.clear()
    run_sweep(invoke, tmp_path, "--tasks", "text", "--attentions", "softmax")
    assert len(asked) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_failed_run_is_told_and_the_exit_code_is_1(invoke, tmp_path):
    result = run_sweep(invoke, tmp_path, "--tasks", "text", "--attentions", "none,softmax")
    assert result.exit_code == 1
    assert "failed: text none seed 0: exit code 1: no mixing, no luck (more in" in result.output
    assert "cells: 1 finished, 1 failed, 0 skipped, of 2" in result.output


@pytest.mark.usefixtures("stand_in")
def test_a_spent_budget_is_told(invoke, tmp_path):
    result = run_sweep(invoke, tmp_path, "--tasks", "text", "--attentions", "mean,softmax", "--budget", "2s")
    assert result.exit_code == 0, result.output
    assert "out of budget: 1 stopped, 1 not begun" in result.output
    assert "cells: 0 finished, 0 failed, 0 skipped, 1 stopped, 1 not begun, of 2" in result.output


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_asked_to_end_lets_its_runs_save(invoke, tmp_path, number):
    directory = run_directory(tmp_path / "runs", "text", "mean", 0)

    def ask():
        deadline = time.monotonic() + 20
        while not (directory / "log.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=ask).start()
    result = run_sweep(invoke, tmp_path, "--tasks", "text", "--attentions", "mean")
    assert result.exit_code == 130
    assert (directory / CHECKPOINT).exists()


@pytest.mark.usefixtures("stand_in")
def test_timing_leaves_results_of_its_own(invoke, tmp_path):
    arguments = ("--tasks", "text", "--attentions", "softmax", "--timing", "--seeds", 3)
    result = run_sweep(invoke, tmp_path, *arguments, "--train-option", "steps=20")
    assert "cells: 1 finished" in result.output
    assert (tmp_path / "runs/text/softmax/timing" / RESULT).exists()


def test_the_table_is_printed_and_written(invoke, tmp_path):
    for seed in range(2):
        write_run(tmp_path / "runs", "text", "softmax", seed)
    write_run(tmp_path / "runs", "text", "softmax", timing=True)
    result = invoke("table", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "62.50 ± 0.00" in result.output
    assert "| text | softmax | 2 |" in (tmp_path / "out/lra-table.md").read_text()
    results = json.loads((tmp_path / "out/lra-table.json").read_text())
    assert results["experiment"] == "lra-table"
    assert results["rows"][0]["accuracy"] == {"mean": 0.625, "deviation": 0.0}
    assert results["rows"][0]["time_over_sdpa"] == 1.0


def test_a_table_of_nothing_is_explained(invoke, tmp_path):
    result = invoke("table", "--runs", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "there is no" in result.output
    assert not (tmp_path / "out").exists()


def test_a_table_that_cannot_be_written_is_explained(invoke, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError("no space left on device")

    write_run(tmp_path / "runs", "text", "softmax", 0)
    monkeypatch.setattr(files, "write_atomically", full)
    result = invoke("table", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "no space left on device" in result.output


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "schoenbat.cli", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "error" in result.stdout


def test_a_group_has_its_own_steps_unless_others_are_given():
    tuning, main = GROUPS["tuning"], GROUPS["main"]
    assert _train_options(tuning, []) == (("steps", str(tuning.steps)),)
    assert dict(_train_options(tuning, ["steps=10", "keep-zeros"])) == {"steps": "10", "keep-zeros": ""}
    assert _train_options(main, []) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--known", "nowhere.json"], "there is no nowhere.json, neither a directory of runs nor a file by"),
        (["--train-option", "stepz=3"], "'lra train' has no option --stepz"),
        (["--out", __file__], "is a file; choose a directory"),
        (["--tasks", "listops"], "data/listops does not exist; prepare listops with: schoenbat data prepare"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(invoke, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = invoke("sweep", "--attentions", "softmax", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())
    assert not list(tmp_path.iterdir())
