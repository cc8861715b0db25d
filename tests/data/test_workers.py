"""Blocks by several processes: their order, errors, and that processes end when nobody wants more of them."""

import itertools
import operator
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from schoenbat.data.workers import blocks_in_order

STOPPED_EARLY = """
import itertools, operator
from functools import partial
from schoenbat.data.workers import blocks_in_order

for _ in range(2):
    blocks = blocks_in_order(partial(operator.mul, bytes(40_000)), itertools.count(1), workers=12)
    assert [len(next(blocks)) for _ in range(30)] == [40_000 * number for number in range(1, 31)]
    blocks.close()
"""

ENDLESS = """
import itertools, operator
from functools import partial
from schoenbat.data.workers import blocks_in_order

for place, block in enumerate(blocks_in_order(partial(operator.mul, bytes(1_000)), itertools.count(1), 6)):
    if place == 20:
        print("begun", flush=True)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_the_order_is_that_of_the_numbers(workers):
    assert list(blocks_in_order(partial(pow, 2), range(20), workers)) == [2**number for number in range(20)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_reaches_the_reader(workers):
    blocks = blocks_in_order(partial(operator.truediv, 6), itertools.count(-1), workers)
    assert next(blocks) == -6
    with pytest.raises(ZeroDivisionError):
        next(blocks)


def test_many_processes_end_where_the_reader_has_enough():
    """In a process of its own: where they wait for one another, nothing else would end."""
    subprocess.run([sys.executable, "-c", STOPPED_EARLY], timeout=100, check=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes where Linux lists them")
@pytest.mark.parametrize("stop", ["killed", "asked by Ctrl-C, again and again"])
def test_workers_end_with_a_parent_that_is(stop):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", ENDLESS], **pipes, start_new_session=True) as parent:
        assert parent.stdout.readline() == b"begun\n"
        assert len(_living(group=parent.pid)) > 6
        if stop == "killed":
            parent.kill()
        else:
            for _ in range(3):
                os.killpg(parent.pid, signal.SIGINT)
                time.sleep(0.1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _living(group=parent.pid):
        time.sleep(0.1)
    assert not _living(group=parent.pid)


def _living(group):
    """The states of a group's processes, but for those that have ended and whose parents do not ask."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended while it was looked for
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
            states += [state] if int(number) == group and state != "Z" else []
    return states
