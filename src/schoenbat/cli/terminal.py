"""What every command shares: console, progress bars, files, exit codes, and errors without a traceback."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from schoenbat.training.interruption import Interrupted

# Paths and notes may hold what would be markup, [copy], or an emoji, :x:.
console = Console(markup=False, emoji=False)
if not console.is_terminal:
    console.width = 100
# How `schoenbat --help` sorts its commands.
ON_THIS_MACHINE, OF_THE_PAPER = "On this machine", "The paper's experiments"
# What a scheduler and a sweep tell these endings from others by.
EXIT_USAGE = 2
EXIT_NOT_FINITE = 3
EXIT_LOST_PROCESS = 4
Row = TypeVar("Row")


def track(rows: Iterable[Row], total: int, description: str) -> list[Row]:
    with progress_bar() as progress:
        return list(progress.track(rows, total=total, description=description))


def advance(progress: Progress, task: TaskID, step: int) -> None:
    progress.update(task, completed=step, refresh=True)


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,  # a thread that redraws the bar would take time from what is being timed
    )


def write(path: Path, options: object, rows: list[Row], svg: str, device: str = "cpu") -> list[Path]:
    """Write ``path`` with the endings .json and .svg."""
    from schoenbat.files import write_atomically
    from schoenbat.report.results import write_results

    files = [path.with_name(f"{path.name}.{ending}") for ending in ("json", "svg")]
    with explained():
        write_results(files[0], path.name, options, rows, device=device)
        write_atomically(files[1], svg)
    return files


def print_files(files: list[Path]) -> None:
    console.print("written:", ", ".join(map(str, files)), soft_wrap=True)


def split_names(text: str | None) -> tuple[str, ...] | None:
    """The names in a list with commas, each of them once."""
    return None if text is None else tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def given(**options: object) -> dict[str, Any]:
    """The options that were given on the command line; the others keep their defaults."""
    return {name: value for name, value in options.items() if value is not None}


def place_for_files(path: Path) -> Path:
    """For --out: a place that cannot be written to is refused before anything is measured for it."""
    with explained():
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} is a link to nowhere; choose another place")
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise ValueError(f"{there} is a file; choose a directory")
        try:
            # Not all that refuses files says so by permissions: a folder is made to see, and removed.
            with TemporaryDirectory(dir=there):
                pass
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}); choose another place") from error
    return path


@contextmanager
def stoppable(kept: str = "nothing was written") -> Iterator[None]:
    """For commands, which Ctrl-C ends with the exit code 130: they say what is kept.

    A training run inside of them notes signals itself: SIGTERM ends it with 143.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped: {kept}", err=True)
        raise
    except Interrupted as stopped:
        typer.echo(f"stopped: {kept}", err=True)
        raise typer.Exit(128 + stopped.number) from None


@contextmanager
def explained() -> Iterator[None]:
    """Show what was wrong with an option without a traceback."""
    try:
        yield
    except typer.Exit:
        raise
    except (ValueError, RuntimeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
