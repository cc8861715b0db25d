"""The commands that bring the tasks of the Long Range Arena onto the disk: prepare, list."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TaskID

from schoenbat.cli.terminal import console, explained, progress_bar, stoppable

if TYPE_CHECKING:
    from schoenbat.data.catalogue import Progress
    from schoenbat.data.task import Task

app = typer.Typer(
    no_args_is_help=True,
    help="The tasks of the Long Range Arena: prepare and list them.",
    epilog="Example: schoenbat data prepare listops",
)

Data = Annotated[Path, typer.Option("--data", help="Directory for the prepared tasks.")]


@app.command(
    epilog="Example: schoenbat data prepare text\n\n"
    "Example: schoenbat data prepare image --from cifar-10-python.tar.gz --data lra\n\n"
    "Example: schoenbat data prepare listops --workers 8 --test-size 20000"
)
@stoppable("nothing of the task was written; an interrupted download goes on when the command is run again")
def prepare(
    task: Annotated[str, typer.Argument(help="listops, text, retrieval, pathfinder or image.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE_OR_URL",
            help="Parquet files or the original, as a file, a folder or a URL. Default: the official URL.",
        ),
    ] = None,
    data: Data = Path("data"),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that generate ListOps or Pathfinder. Default: all.")
    ] = None,
    test_size: Annotated[
        int | None, typer.Option(min=1, help="How many test expressions of ListOps. Default: 2000.")
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(help="Which pairs of Retrieval: matched, uniform or lra. Default: matched.")
    ] = None,
) -> None:
    """Generate or read a task, and keep it for training.

    ListOps and Pathfinder are generated, the same on every machine. Text and Image are downloaded unless
    --from says where they are; an interrupted download goes on when the command is run again. Retrieval
    needs --from.
    """
    from schoenbat.data import prepare as prepare_task

    with explained(), _progress() as on_progress:
        prepared = prepare_task(
            task,
            data,
            source,
            workers=workers or os.cpu_count() or 1,
            test_size=test_size,
            pairs=pairs,
            on_progress=on_progress,
        )
    _print_task(prepared)
    console.print(f"written: {data / task}", soft_wrap=True)


@app.command("list", epilog="Example: schoenbat data list --data lra")
def list_tasks(data: Data = Path("data")) -> None:
    """Which tasks are prepared, how large they are, and their fingerprints."""
    from rich import box
    from rich.table import Table

    from schoenbat.data import task_names

    # With a box around every cell 80 columns would be too few for the fingerprints.
    table = Table("task", title=f"tasks in {data}", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.show_edge = False
    for column in ("train", "validation", "test", "length"):
        table.add_column(column, justify="right")
    table.add_column("options")
    table.add_column("fingerprint")
    problems = []
    for name in task_names():
        try:
            table.add_row(name, *_cells(name, data))
        except ValueError as error:
            table.add_row(name, *5 * [""], "damaged")
            problems.append(str(error))
    console.print(table)
    for problem in problems:
        console.print(problem, style="red", soft_wrap=True, highlight=False)


def _cells(name: str, data: Path) -> list[str]:
    """The row of a task, after its name."""
    from schoenbat.data import load
    from schoenbat.data.cache import read_manifest

    if not (data / name).is_dir():
        return [*5 * [""], "not prepared"]
    task = load(name, data)
    options = ", ".join(f"{key}={value}" for key, value in read_manifest(data / name).options.items())
    sizes = (len(task.train), len(task.validation), len(task.test), task.max_length)
    return [*(f"{size:,}" for size in sizes), options, task.fingerprint[:16]]


def _print_task(task: "Task") -> None:
    from schoenbat.data.retrieval import floors

    sizes = (f"{len(split):,}" for split in (task.train, task.validation, task.test))
    console.print(
        f"{task.name}: {' + '.join(sizes)} examples of up to {task.max_length:,} tokens, "
        f"fingerprint {task.fingerprint[:16]}",
        soft_wrap=True,
    )
    if task.paired:
        floor = floors(task.train, task.test)
        console.print(
            f"without reading: {floor.majority:.1%} on test by the more frequent answer, "
            f"{floor.citations:.1%} by how often the second paper is cited in the training pairs",
            soft_wrap=True,
        )


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A bar for each stage, from when it is first told of."""
    with progress_bar() as progress:
        bars: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int | None) -> None:
            # Bytes are too many digits to read.
            unit = 1_000_000 if stage == "downloading" else 1
            if stage not in bars:
                bars[stage] = progress.add_task(stage if unit == 1 else f"{stage} (MB)", total=None)
            progress.update(
                bars[stage],
                completed=done // unit,
                total=None if total is None else total // unit,
                refresh=True,
            )

        yield show
