"""`schoenbat lra train` in two processes: killed, started again, stopped; nothing that was saved is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from schoenbat.data import cache
from schoenbat.data.arrays import consecutive
from schoenbat.training.log import read_log
from schoenbat.training.record import LOG, RESULT, find_checkpoint, read_result, run_directory
from schoenbat.training.shards import load_rest

pytestmark = pytest.mark.slow
ATTENTION = "schoenbat:num_features=16,normalization=batch"
# With --checkpoint-seconds 0 a checkpoint is written whenever two processes ask each other.
CHECKPOINT_STEPS = 10
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "schoenbat"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The Image task with 24 small images of noise."""
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(1, 256, (24, 32)).astype(np.uint8), rng.integers(0, 10, 24)
    arrays = consecutive(pixels, np.full(24, 32), labels, {"train": 16, "validation": 4, "test": 4})
    directory = tmp_path_factory.mktemp("data")
    cache.write(directory / "image", arrays, {}, {})
    return directory


def start(program, data, out, *options):
    """Begin a run of 150 steps; what it says goes to a file beside its directory."""
    cell = ["lra", "train", "--task", "image", "--attention", ATTENTION, "--accelerator", "cpu"]
    settings = ["--steps", "150", "--batch-size", "4", "--evaluate-every", "50", "--checkpoint-seconds", "0"]
    where = ["--data", str(data), "--out", str(out)]
    with out.with_suffix(".txt").open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *program, *cell, *settings, *where, *options],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def said(out):
    return " ".join(out.with_suffix(".txt").read_text().split())


def directory(out):
    return run_directory(out, "image", ATTENTION, 0)


def wait_for_checkpoint(out, process, other_than=None):
    deadline = time.monotonic() + 120
    while find_checkpoint(directory(out)) in (None, other_than):
        assert process.poll() is None, said(out)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(random.random())


def kill_one(process):
    """End one of the processes that torchrun has started, the first or the second."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(random.choice(children)), signal.SIGKILL)


def assert_same_end(first, second):
    one, other = (load_rest(find_checkpoint(directory(out))) for out in (first, second))
    for name in ("step", "validation"):
        assert one[name] == other[name]
    assert one["random_states"].equal(other["random_states"])
    assert read_log(directory(first) / LOG) == read_log(directory(second) / LOG)
    one, other = (read_result(directory(out) / RESULT).record for out in (first, second))
    assert (one.best, one.last) == (other.best, other.last)


def test_kill_9_of_one_process(data, tmp_path):
    """The other ends and says what to do; --resume, and torchrun by itself, go on to the undisturbed end."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(TORCHRUN, data, whole, "--strategy", "fsdp").wait(timeout=240) == 0, said(whole)

    process = start(TORCHRUN, data, parts, "--strategy", "fsdp")
    wait_for_checkpoint(parts, process)
    kill_one(process)
    assert process.wait(timeout=60) != 0
    assert "run the same command again with --resume" in said(parts)
    saved = load_rest(find_checkpoint(directory(parts)))["step"]
    reported = [line["step"] for line in read_log(directory(parts) / LOG)]
    assert max([0, *reported]) - CHECKPOINT_STEPS <= saved < 150

    left = find_checkpoint(directory(parts))
    elastic = [*TORCHRUN[:-2], "--max-restarts", "1", *TORCHRUN[-2:]]
    process = start(elastic, data, parts, "--strategy", "fsdp", "--resume")
    wait_for_checkpoint(parts, process, other_than=left)
    kill_one(process)
    assert process.wait(timeout=240) == 0, said(parts)
    assert_same_end(whole, parts)


@pytest.mark.parametrize("program", [TORCHRUN, ["schoenbat"]])
def test_sigterm_saves_in_all_processes(data, tmp_path, program):
    out = tmp_path / "runs"
    devices = [] if program is TORCHRUN else ["--devices", "2"]
    process = start(program, data, out, *devices)
    wait_for_checkpoint(out, process)
    process.terminate()
    code = process.wait(timeout=60)
    # torchrun has a code of its own, whatever its processes end with.
    assert code == (1 if program is TORCHRUN else 143)
    text = said(out)
    assert text.count("continue with --resume") == 1, text
    step = torch.load(find_checkpoint(directory(out)))["step"]
    assert f"stopped after step {step};" in text
