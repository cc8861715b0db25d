"""Runs that are timed on one machine: they set up side by side, and take their steps one at a time.

Setting up uses the device as well, so nobody is timed meanwhile. Who waits to be timed keeps others from
beginning to set up, or the turn might never come. Only runs of one user wait for one another.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from schoenbat.files import try_lock
from schoenbat.training.interruption import StopRequest

_POLL = 0.05


def _folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"schoenbat-timing-{user}"


@contextmanager
def _open(name: str) -> Iterator[IO[bytes]]:
    """A file to be locked; closed, it is not locked any more."""
    _folder().mkdir(exist_ok=True)
    with (_folder() / name).open("ab") as file:
        yield file


@contextmanager
def setting_up() -> Iterator[None]:
    """Inside, other runs may set up as well, but none is timed."""
    with _open("device") as device:
        with _open("door") as door:
            while not try_lock(door) or not try_lock(device, shared=True):
                time.sleep(_POLL)
        yield


@contextmanager
def turn(stop: StopRequest, on_wait: Callable[[], None]) -> Iterator[None]:
    """Inside, no other run sets up or is timed; where a run is asked to stop, it waits no longer."""
    with _open("door") as door, _open("device") as device:
        if not try_lock(door) or not try_lock(device):
            on_wait()
        while not stop and not (try_lock(door) and try_lock(device)):
            time.sleep(_POLL)
        yield
