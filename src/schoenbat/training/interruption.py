"""Ending a run in good order when a scheduler asks for it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):  # noqa: N818 - not an error: the run was asked to stop
    """The run was asked to stop, and what it has done is saved."""


class StopRequest:
    """False until SIGTERM arrives while `listening`."""

    def __init__(self) -> None:
        self._arrived = False

    def __bool__(self) -> bool:
        return self._arrived

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, SIGTERM does not end the process but is noted."""

        def note(number: int, frame: Any) -> None:
            self._arrived = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
