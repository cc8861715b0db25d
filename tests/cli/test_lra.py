"""`schoenbat lra train` as a user meets it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from schoenbat.cli import app
from schoenbat.cli.train import _bar
from schoenbat.data import cache
from schoenbat.data.arrays import consecutive
from schoenbat.registry import attention_names, build_attention
from schoenbat.training.claim import claim, told_who_holds
from schoenbat.training.interruption import Interrupted
from schoenbat.training.options import RunOptions
from schoenbat.training.protocol import Protocol
from schoenbat.training.record import CHECKPOINT, LOG, RESULT, run_directory
from schoenbat.training.run import Progress

SMALL = ["--steps", "8", "--batch-size", "4", "--evaluate-every", "4"]


@pytest.fixture
def data(tmp_path):
    """The Image task with 24 images of noise."""
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (24, 1024)).astype(np.uint8), rng.integers(0, 10, 24)
    arrays = consecutive(pixels, np.full(24, 1024), labels, {"train": 16, "validation": 4, "test": 4})
    cache.write(tmp_path / "data" / "image", arrays, {}, {})
    return tmp_path / "data"


def command(data, tmp_path, *arguments):
    cell = ["lra", "train", "--task", "image", "--attention", "mean"]
    return [*cell, "--data", str(data), "--out", str(tmp_path / "runs"), *arguments]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})


def test_a_run_prints_and_writes_its_result(data, tmp_path):
    result = invoke(*command(data, tmp_path, *SMALL, "--seed", "3"))
    assert result.exit_code == 0, result.output
    assert "test accuracy" in result.output
    assert "too few steps to time" in result.output
    directory = run_directory(tmp_path / "runs", "image", "mean", 3)
    written = json.loads((directory / RESULT).read_text())
    assert written["experiment"] == "lra-train"
    assert written["options"]["protocol"]["batch_size"] == 4
    (row,) = written["rows"]
    assert (row["task"], row["seed"], row["steps"], row["timed_steps"]) == ("image", 3, 8, 0)
    assert row["parameters"] > 0
    assert (directory / LOG).exists()


def test_the_bar_says_what_takes_a_while_after_the_last_step():
    with _bar(RunOptions("image", "mean", Protocol.paper("image", steps=8))) as (bar, on_progress):
        seen = []
        for more in ({}, {"evaluates": "validation"}, {"validation": 0.5}, {"evaluates": "test"}):
            on_progress(Progress(8, **more))
            seen.append(bar.tasks[0].fields["status"])
    assert seen == ["", "validating", "validation 50.0%", "validation 50.0%  testing"]


def test_a_complete_run_is_not_run_again_and_a_begun_one_not_overwritten(data, tmp_path):
    arguments = command(data, tmp_path, *SMALL)
    assert invoke(*arguments).exit_code == 0
    again = invoke(*arguments, "--resume")
    assert again.exit_code == 0
    assert "this run is complete" in again.output
    other = invoke(*arguments, "--resume", "--learning-rate", "1")
    assert other.exit_code == 2
    assert "learning_rate: 0.0001 there, 1.0 here" in " ".join(other.output.replace("│", " ").split())
    for _ in range(2):
        over = invoke(*arguments)
        assert over.exit_code == 2
        assert "--resume" in over.output
        # Of a run that is complete the checkpoint may have been cleared away.
        (run_directory(tmp_path / "runs", "image", "mean", 0) / CHECKPOINT).unlink(missing_ok=True)


def test_a_damaged_result_is_refused_with_what_to_do(data, tmp_path):
    path = run_directory(tmp_path / "runs", "image", "mean", 0) / RESULT
    path.parent.mkdir(parents=True)
    path.write_text('{"experiment"')
    refused = invoke(*command(data, tmp_path, *SMALL, "--resume"))
    assert refused.exit_code == 2
    assert "delete it, and the run goes on" in " ".join(refused.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("more", "kept"), [([], "continue with --resume"), (["--timing"], "nothing of a timing is kept")]
)
def test_a_run_that_is_stopped_says_what_is_kept(data, tmp_path, monkeypatch, more, kept):
    def stopped(*arguments, **options):
        raise Interrupted("stopped after step 3", signal.SIGINT)

    monkeypatch.setattr("schoenbat.training.run.train", stopped)
    result = invoke(*command(data, tmp_path, *SMALL, "--steps", "20", *more))
    assert result.exit_code == 130
    assert result.stderr.strip() == f"stopped after step 3; {kept}"


def test_a_seed_that_no_generator_takes_is_refused(data, tmp_path):
    refused = invoke(*command(data, tmp_path, *SMALL, "--seed", "99999999999999999999"))
    assert refused.exit_code == 2
    assert "at most 64 bits" in " ".join(refused.output.replace("│", " ").split())


def test_a_place_that_cannot_be_written_to_is_named(data, tmp_path):
    (tmp_path / "runs").touch()
    refused = invoke(*command(data, tmp_path, *SMALL))
    assert refused.exit_code == 2
    assert "is a file; choose a directory" in " ".join(refused.output.replace("│", " ").split())


def test_a_directory_belongs_to_one_program(data, tmp_path, monkeypatch):
    arguments, directory = (
        command(data, tmp_path, *SMALL),
        run_directory(tmp_path / "runs", "image", "mean", 0),
    )
    with claim(directory):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert "another program trains in" in " ".join(refused.output.replace("│", " ").split())
        # A sweep holds it for the run that it starts.
        for name, value in told_who_holds(directory).items():
            monkeypatch.setenv(name, value)
        assert invoke(*arguments).exit_code == 0
    assert claim(directory) is not None


def test_a_run_of_other_data_is_another_run(data, tmp_path):
    arguments = command(data, tmp_path, *SMALL)
    assert invoke(*arguments).exit_code == 0
    pixels, size = np.ones((24, 1024), dtype=np.uint8), {"train": 16, "validation": 4, "test": 4}
    cache.write(data / "image", consecutive(pixels, np.full(24, 1024), np.arange(24) % 10, size), {}, {})
    other = invoke(*arguments, "--resume")
    assert other.exit_code == 2
    assert re.search("data: '.*' there, '.*' here", " ".join(other.output.replace("│", " ").split()))
    (data / "image").rename(data / "elsewhere")
    assert "this run is complete" in invoke(*arguments, "--resume").output


def test_timing(data, tmp_path):
    result = invoke(*command(data, tmp_path, "--batch-size", "2", "--timing"))
    assert result.exit_code == 0, result.output
    directory = run_directory(tmp_path / "runs", "image", "mean", 0, timing=True)
    (row,) = json.loads((directory / RESULT).read_text())["rows"]
    assert (row["timed_steps"], row["best"]) == (200, None)


def test_a_timing_is_not_overwritten(data, tmp_path):
    arguments = command(data, tmp_path, "--batch-size", "2", "--timing")
    assert invoke(*arguments, "--steps", "12").exit_code == 0
    directory = run_directory(tmp_path / "runs", "image", "mean", 0, timing=True)
    before = (directory / RESULT).read_text()
    again = invoke(*arguments)
    assert again.exit_code == 2
    assert "holds a timing already; choose another --out" in " ".join(again.output.replace("│", " ").split())
    assert (directory / RESULT).read_text() == before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--task", "texts"], "unknown task 'texts'"),
        (["--attention", "means"], "unknown attention 'means'"),
        (["--task", "text"], "schoenbat data prepare text"),
        (["--steps", "1"], "at least 2 steps"),
        (["--timing", "--steps", "10"], "the first 10 steps are not timed; --timing needs more, got 10"),
        (["--precision", "8-bit"], "8-bit"),
        (["--accelerator", "abacus"], "abacus"),
        (["--strategy", "zero"], "--strategy is one of auto, ddp, fsdp"),
    ],
)
def test_what_is_wrong_is_said(data, tmp_path, arguments, problem):
    result = invoke(*command(data, tmp_path, *SMALL, *arguments))
    assert result.exit_code == 2, result.output
    assert problem in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_a_batch_that_cannot_be_split_is_refused_before_processes_are_started(data, tmp_path):
    result = invoke(*command(data, tmp_path, *SMALL, "--devices", "2", "--batch-size", "3"))
    assert result.exit_code == 2
    assert "a batch of 3 cannot be split over 2 devices evenly" in result.output
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_not_finite_has_an_exit_code_of_its_own(data, tmp_path):
    result = invoke(*command(data, tmp_path, *SMALL, "--learning-rate", "1e30", "--warmup", "1"))
    assert result.exit_code == 3, result.output
    assert "learning rate was" in result.output
    assert not (run_directory(tmp_path / "runs", "image", "mean", 0) / RESULT).exists()


def test_sigterm_saves_and_resume_completes(data, tmp_path):
    arguments = command(data, tmp_path, "--steps", "3000", "--batch-size", "2", "--evaluate-every", "1000")
    directory = run_directory(tmp_path / "runs", "image", "mean", 0)
    process = subprocess.Popen(
        [sys.executable, "-m", "schoenbat.cli", *arguments], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not ((directory / LOG).exists() and (directory / LOG).read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "continue with --resume" in stderr
    assert (directory / CHECKPOINT).exists()
    other = invoke(*arguments, "--resume", "--learning-rate", "1")
    assert other.exit_code == 2
    assert "other options" in " ".join(other.output.replace("│", " ").split())


def test_help_says_what_an_attention_may_be(data, tmp_path):
    shown = " ".join(invoke("lra", "train", "--help").output.replace("│", " ").split())
    assert [name for name in attention_names() if name not in shown] == []
    for option in ("causal=true", "causal=both", "rotary=true", "conv=K", "head_norm=true"):
        assert option in shown
        build_attention(f"softmax:{option.replace('K', '3')}", head_dim=32, num_heads=2)
    assert "schoenbat:kernel=(2+x)**2." in shown
    refused = invoke(*command(data, tmp_path, "--attention", "schoenbat:x=1")).output
    assert "known are num_features, kernel," in " ".join(refused.replace("│", " ").split())


def test_help_has_the_published_settings():
    shown = " ".join(invoke("lra", "train", "--help").output.replace("│", " ").split())
    assert "--steps <int> Default: 10,000." in shown
    assert "Default: 32 (text, listops); 16 (retrieval); 128 (pathfinder); 256 (image)." in shown
    assert "Default: 0.0001 (text, listops, image); 0.0002 (retrieval, pathfinder)." in shown
    assert "Default: 80 (text); 1,000 (listops); 800 (retrieval); 312 (pathfinder); 175 (image)" in shown


@pytest.mark.parametrize("name", ["train", "sweep", "table"])
def test_help_shows_an_example(name):
    result = invoke("lra", name, "--help")
    assert result.exit_code == 0
    assert f"Example: schoenbat lra {name}" in " ".join(result.output.split())
