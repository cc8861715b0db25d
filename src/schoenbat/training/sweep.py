"""Many training runs as one: whatever is missing of tasks × attentions × seeds, within a time budget.

Every cell is a process of its own that keeps its files in its own directory. A cell with a result is done and
a cell with a checkpoint is continued, so a sweep may be ended at any moment, in any way, and started again.
"""

import os
import re
import signal
import subprocess  # nosec B404 - a sweep is made of processes
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from schoenbat.training.cells import GRACE, Cell, SweepOptions, disagreement, is_done, is_known, train_command
from schoenbat.training.claim import claim, told_who_holds
from schoenbat.training.gathered import read_runs
from schoenbat.training.log import read_log
from schoenbat.training.record import LOG, RESULT, find_checkpoint, read_result

STDERR = "stderr.txt"
DONE = "it is done"
LOCKED = "another program is running it"
_POLL = 0.05
_REPORT = 1.0
_STDERR_LINES = 40
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Started:
    cell: Cell
    resumed: bool


@dataclass(frozen=True)
class Progressed:
    """Comes every second for each running cell; None for what its log does not tell yet."""

    cell: Cell
    step: int | None = None
    loss: float | None = None
    validation: float | None = None


@dataclass(frozen=True)
class Finished:
    cell: Cell
    seconds: float


@dataclass(frozen=True)
class Failed:
    cell: Cell
    message: str
    """What it ended with, and the last line of its stderr."""
    path: Path
    """The file that tells more."""


@dataclass(frozen=True)
class Skipped:
    cell: Cell
    reason: str


@dataclass(frozen=True)
class OutOfBudget:
    stopped: tuple[Cell, ...]
    """Begun; what they had reached is in their checkpoints."""
    waiting: tuple[Cell, ...]
    """Not begun in this sweep."""


Command = Callable[[Cell], list[str]]
Event = Started | Progressed | Finished | Failed | Skipped | OutOfBudget


def parse_duration(text: str) -> float:
    """Seconds of ``"90"``, ``"90s"``, ``"9m"`` or ``"1h30m"``.

    >>> parse_duration("1h30m"), parse_duration("9m"), parse_duration("0.5")
    (5400.0, 540.0, 0.5)
    """
    number = r"(\d+(?:\.\d+)?)"
    parts = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text.strip())
    hours, minutes, seconds = (float(part or 0) for part in parts.groups()) if parts else (0.0, 0.0, 0.0)
    duration = 3600 * hours + 60 * minutes + seconds
    if duration <= 0:
        raise ValueError(f"{text!r} is not a duration; write seconds as 90 or 90s, or 9m, 1h30m, 2h")
    return duration


def read_progress(cell: Cell, out: Path) -> Progressed:
    """How far a run has come by its log, of which the last line may be half written."""
    latest: dict[str, Any] = {}
    for line in read_log(cell.directory(out) / LOG):
        latest |= line
    return Progressed(cell, *(latest.get(name) for name in ("step", "loss", "validation")))


def unfinished(options: SweepOptions) -> list[Cell]:
    """The cells that are neither done nor known."""
    known = read_runs(options.known)[0] if options.known is not None else []
    return [cell for cell in options.cells if not (is_done(cell, options) or is_known(cell, options, known))]


def run(
    options: SweepOptions, command: Command | None = None, missing: Sequence[Cell] | None = None
) -> Generator[Event, None, None]:
    """Run the cells that are not done, those first that were begun, and tell what happens.

    A cell that fails stops no other and is not tried again. However the iteration ends (at the end of the
    budget, closed, or by an exception such as Ctrl-C), the running cells are asked to end, and ended by force
    after `GRACE` seconds. ``command`` gives a cell's command line in place of `train_command`; ``missing`` is
    what `unfinished` gave, where it was asked already.
    """
    budget = options.budget
    deadline = time.monotonic() + budget
    stop_at = deadline - min(GRACE, budget / 4)
    missing = unfinished(options) if missing is None else missing
    yield from (Skipped(cell, DONE) for cell in options.cells if cell not in missing)
    waiting = deque(_begun_first(missing, options.out))
    running: list[_Process] = []
    next_report = 0.0
    try:
        while (waiting or running) and time.monotonic() < stop_at:
            while waiting and len(running) < options.parallel:
                started = _start(waiting.popleft(), options, command)
                if isinstance(started, _Process):
                    running.append(started)
                    yield Started(started.cell, started.resumed)
                else:
                    yield started
            for process in [process for process in running if process.has_ended()]:
                running.remove(process)
                yield process.outcome(options)
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT
                yield from [read_progress(process.cell, options.out) for process in running]
            time.sleep(_POLL)
        if waiting or running:
            yield from _out_of_budget(running, waiting, options, deadline)
    finally:
        _stop(running, min(deadline, time.monotonic() + GRACE))


@dataclass(eq=False)
class _Process:
    """A running cell; the lock is held as long as this or the process itself is there."""

    cell: Cell
    handle: subprocess.Popen[bytes]
    lock: IO[bytes]
    stderr: Path
    began: float
    resumed: bool

    def has_ended(self) -> bool:
        return self.handle.poll() is not None

    def outcome(self, options: SweepOptions) -> Finished | Failed:
        code = self.handle.returncode
        lines = _tail(self.stderr)[-_STDERR_LINES:]
        self.stderr.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self.lock.close()
        if code == 0 and is_done(self.cell, options):
            return Finished(self.cell, time.monotonic() - self.began)
        ending = f"exit code {code}" if code else "no result that agrees with its options"
        return Failed(self.cell, f"{ending}: {_last_words(lines)}", self.stderr)


def _last_words(lines: list[str]) -> str:
    """What a run ended with: its last line, what was drawn last, or what an error says below that.

    A panel's upper edge may be missing: of a long traceback only the end is kept.
    """
    end = _last_start(lines, "╰")
    if end is None:
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing on stderr")
    below = next((line.strip() for line in lines[end + 1 :] if line.strip()), None)
    if below:
        return below
    panel = lines[_last_start(lines, "╭") or 0 : end]
    return " ".join(line.strip("│ ") for line in panel if line.startswith("│"))


def _last_start(lines: list[str], character: str) -> int | None:
    return max((place for place, line in enumerate(lines) if line.startswith(character)), default=None)


def _start(cell: Cell, options: SweepOptions, command: Command | None) -> "_Process | Skipped | Failed":
    directory = cell.directory(options.out)
    try:
        lock = claim(directory)
    except OSError as error:
        return Failed(cell, f"{directory} cannot be written ({error.strerror})", directory)
    if lock is None:
        return Skipped(cell, LOCKED)
    obstacle = _clear_result(cell, options)
    if obstacle:
        lock.close()
        return obstacle
    resumed = find_checkpoint(directory) is not None
    stderr = directory / STDERR
    with stderr.open("wb") as file:
        handle = subprocess.Popen(  # nosec B603 - this interpreter with the sweep's own options, no shell
            command(cell) if command else train_command(cell, options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            # Ctrl-C in the terminal is the sweep's to handle, which then asks the runs to end.
            start_new_session=True,
            # Where a sweep is killed and its runs live on, they keep their locks.
            pass_fds=(lock.fileno(),),
            env=told_who_holds(directory),
        )
    return _Process(cell, handle, lock, stderr, time.monotonic(), resumed)


def _clear_result(cell: Cell, options: SweepOptions) -> Skipped | Failed | None:
    """Remove a damaged result, which would be taken for that of a complete run; keep every other."""
    path = cell.directory(options.out) / RESULT
    if not path.exists():
        return None
    try:
        result = read_result(path)
    except ValueError:
        path.unlink()
        return None
    other = disagreement(result, cell, options)
    if other is None:
        # Another sweep has ended it since this one looked.
        return Skipped(cell, DONE)
    return Failed(cell, f"its result has {other}; choose another --out, or delete {path.parent}", path)


def _out_of_budget(
    running: list[_Process], waiting: Iterable[Cell], options: SweepOptions, deadline: float
) -> Iterator[Event]:
    stopped = []
    ended = _stop(running, deadline)
    for process in ended:
        code = process.handle.returncode
        outcome = process.outcome(options)
        if code in (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM):
            stopped.append(process.cell)
        else:
            yield outcome
    yield OutOfBudget(tuple(stopped), tuple(waiting))


def _stop(running: list[_Process], deadline: float) -> list[_Process]:
    """Ask all to end, wait until ``deadline``, then end them by force; ``running`` is empty afterwards."""
    for process in running:
        process.handle.terminate()
    try:
        while time.monotonic() < deadline and not all(process.has_ended() for process in running):
            time.sleep(_POLL)
    finally:
        for process in running:
            if not process.has_ended():
                # The whole group: a run may have workers.
                os.killpg(process.handle.pid, signal.SIGKILL)
                process.handle.wait()
        ended, running[:] = list(running), []
    return ended


def _begun_first(cells: Iterable[Cell], out: Path) -> list[Cell]:
    return sorted(cells, key=lambda cell: find_checkpoint(cell.directory(out)) is None)


def _tail(path: Path) -> list[str]:
    """The last whole or half lines of a file; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
