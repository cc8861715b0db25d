"""Programs that share a directory take turns."""

import fcntl
import os
import subprocess
import sys

import pytest

from schoenbat.files import one_at_a_time, write_atomically

COUNT = """
import sys, time
from pathlib import Path
from schoenbat.files import one_at_a_time

directory = Path(sys.argv[1])
for _ in range(10):
    with one_at_a_time(directory):
        file = directory / "count"
        number = int(file.read_text()) if file.exists() else 0
        time.sleep(0.002)  # a program that did not wait would read the same number now
        file.write_text(str(number + 1))
"""


def test_what_is_read_and_written_again_is_not_lost(tmp_path):
    programs = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path)]) for _ in range(3)]
    assert [program.wait() for program in programs] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "30"


def test_an_error_lets_the_next_one_in(tmp_path):
    def is_free():
        handle = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return True

    def fail():
        with one_at_a_time(tmp_path):
            assert not is_free()
            raise ValueError("an error")

    with pytest.raises(ValueError, match="an error"):
        fail()
    assert is_free()


def test_a_file_that_cannot_be_made_is_named(tmp_path):
    """Not the temporary one beside it."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "results.json"
    with pytest.raises(OSError, match=rf"{path} cannot be written \(.*\); choose another place"):
        write_atomically(path, "{}")
