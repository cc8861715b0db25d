"""A disk that is full, files that are cut off: nothing is lost that was whole, and no half file is taken."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from training.tiny import tiny_options, tiny_task

from schoenbat.data import cache
from schoenbat.data.arrays import consecutive
from schoenbat.training import checkpoint
from schoenbat.training.checkpoint import CheckpointError
from schoenbat.training.interruption import Interrupted
from schoenbat.training.record import CHECKPOINT
from schoenbat.training.run import train

# A limit on the size of files stands for the end of a disk: the real writes fail, half way through.
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
WRITERS = {
    "checkpoint": """
from schoenbat.training import checkpoint
import torch
checkpoint.save(path, {"model": {"weight": torch.zeros(100_000)}})
""",
    "cache": """
from schoenbat.data import cache
from schoenbat.data.arrays import consecutive
import numpy as np
sizes = {"train": 998, "validation": 1, "test": 1}
store, ones = np.ones((1000, 100), np.uint8), np.ones(1000, int)
cache.write(path, consecutive(store, ones, ones, sizes), {}, {})
""",
    "result": """
from schoenbat.files import write_atomically
write_atomically(path, "x" * 100_000)
""",
}


def write_the_first(what: str, path: Path) -> None:
    if what == "checkpoint":
        checkpoint.save(path, {"step": 1})
    elif what == "cache":
        sizes = {"train": 2, "validation": 1, "test": 1}
        arrays = consecutive(np.zeros((4, 2), np.uint8), np.ones(4, int), np.arange(4), sizes)
        cache.write(path, arrays, {}, {})
    else:
        path.write_text("whole")


def read_whole(what: str, path: Path) -> object:
    if what == "checkpoint":
        return checkpoint.load(path)
    return cache.read(path)[1].fingerprint if what == "cache" else path.read_text()


@pytest.mark.parametrize("there_before", [False, True])
@pytest.mark.parametrize("what", sorted(WRITERS))
def test_a_full_disk_leaves_what_was_there_and_says_what_to_do(tmp_path, what, there_before):
    path = tmp_path / "place" / what
    path.parent.mkdir()
    before = None
    if there_before:
        write_the_first(what, path)
        before = read_whole(what, path)
    code = f"{FULL}from pathlib import Path\npath = Path({str(path)!r})\n{WRITERS[what]}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "make room" in ended.stderr.splitlines()[-1]
    assert path.exists() == there_before
    assert before is None or read_whole(what, path) == before
    assert [left.name for left in path.parent.iterdir()] == [what] * there_before


def test_a_cut_off_checkpoint_is_named_and_not_taken(tmp_path):
    options = tiny_options("mean", steps=20, evaluate_every=10)

    def stop(progress):
        if progress.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(tiny_task(), options, tmp_path, on_progress=stop)
    path = tmp_path / CHECKPOINT
    content = path.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cannot be read .*delete it to train from the beginning"):
            train(tiny_task(), options, tmp_path, resume=True)
    path.write_bytes(content)
    train(tiny_task(), options, tmp_path, resume=True)


def test_a_checkpoint_runs_no_code(tmp_path):
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return Path.touch, (marker,)

    torch.save({"model": Hostile()}, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path / "checkpoint.pt")
    assert not marker.exists()
