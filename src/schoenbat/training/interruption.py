"""Ending a run in good order when a scheduler asks for it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):  # noqa: N818 - not an error: the run was asked to stop
    """The run was asked to stop by the signal ``number``, and what it has done is saved."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        # A device whose neighbour got the signal knows of no number.
        self.number = number or signal.SIGTERM


class StopRequest:
    """False until SIGTERM or SIGINT (Ctrl-C) arrives while `listening`."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, such a signal does not end the process but is noted; only a second Ctrl-C ends it."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def note(number: int, frame: Any) -> None:
            self.number = number
            signal.signal(signal.SIGINT, before[signal.SIGINT])

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
