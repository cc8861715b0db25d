"""The directory of a run belongs to one program at a time, a sweep or a run that was started by hand."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from schoenbat.files import try_lock

LOCK = ".lock"
# What a sweep tells the run that it starts: the directory that it holds for it.
_HELD = "SCHOENBAT_HELD_DIRECTORY"


def claim(directory: Path) -> IO[bytes] | None:
    """Take a directory until what this returns is closed; None where another program has it."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / LOCK).open("wb")
    if try_lock(lock):
        return lock
    lock.close()
    return None


def told_who_holds(directory: Path) -> dict[str, str]:
    """The environment of a run for which this program holds the directory."""
    return {**os.environ, _HELD: str(directory.resolve())}


def claimed(directory: Path) -> AbstractContextManager[Any]:
    """Of a run, until it is left: its directory, unless whoever has started it holds that already.

    Raises:
        ValueError: if another program works there.
    """
    if os.environ.get(_HELD) == str(directory.resolve()):
        return nullcontext()
    lock = claim(directory)
    if lock is None:
        raise ValueError(
            f"another program trains in {directory}; wait until it has ended, or choose another --out"
        )
    return lock
