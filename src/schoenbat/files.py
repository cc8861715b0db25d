"""Files that are whole or not there."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:
    fcntl = None


def write_atomically(path: Path, content: str) -> None:
    """Write so that ``path`` holds the whole content or what it held before, whenever the program ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    except OSError as error:
        raise OSError(
            error.errno, f"{path} cannot be written ({error.strerror}); choose another place"
        ) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        # mkstemp makes files that only their owner may read; results are for everybody.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            advice = "what it held is kept: make room, or choose another place, and run it again"
            raise OSError(error.errno, f"{path} cannot be written ({error.strerror}); {advice}") from error
        raise


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Other programs that ask for the same directory wait: for what is read, changed and written again.

    Where there are no such locks (on Windows), nobody waits.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Lock a file until it is closed, alone or shared with others that share it; False where others hold it.

    Who has locked it may lock it again. Where there are no such locks (on Windows), nobody holds any.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
