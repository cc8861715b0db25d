"""Runs that are timed on one machine, one at a time."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schoenbat.training.interruption import StopRequest

_POLL = 0.05


def _lock() -> Path:
    return Path(tempfile.gettempdir()) / f"schoenbat-timing-{os.getuid()}.lock"


@contextmanager
def turn(stop: StopRequest) -> Iterator[None]:
    """Inside, no other run of this user's is; where a run is asked to stop, it waits no longer."""
    with _lock().open("ab") as file:
        while not stop:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL)
        yield
