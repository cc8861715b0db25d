"""The command that trains: one attention on one task of the Long Range Arena."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schoenbat.cli.terminal import (
    EXIT_LOST_PROCESS,
    EXIT_NOT_FINITE,
    EXIT_USAGE,
    console,
    explained,
    given,
    place_for_files,
    print_files,
)
from schoenbat.experiments.groups import TASKS
from schoenbat.registry import attention_names
from schoenbat.training.protocol import Protocol
from schoenbat.training.record import (
    EXPERIMENT,
    RESULT,
    TIMED_STEPS,
    WARM_STEPS,
    find_checkpoint,
    read_result,
    run_directory,
)

if TYPE_CHECKING:
    from schoenbat.data import Task
    from schoenbat.training.options import RunOptions
    from schoenbat.training.record import RunRecord
    from schoenbat.training.run import OnProgress
    from schoenbat.training.run import Progress as TrainingProgress

ACCELERATORS = ("auto", "cpu", "cuda")
PRECISIONS = ("bf16-mixed", "32-true")
EVALUATES = {"validation": "validating", "test": "testing", None: ""}

app = typer.Typer()


def _published(name: str, more: str = "") -> Any:
    """The option of a setting of the paper's protocol, with what that says for each task."""
    tasks: dict[str, list[str]] = {}
    for task in TASKS:
        tasks.setdefault(f"{getattr(Protocol.paper(task), name):,}", []).append(task)
    values = [f"{value} ({', '.join(own)})" for value, own in tasks.items()]
    default = next(iter(tasks)) if len(tasks) == 1 else "; ".join(values)
    return typer.Option(help=f"Default: {default}{more}.", rich_help_panel="Protocol")


@app.command(
    epilog="Example: schoenbat lra train --task listops --attention schoenbat:kernel=inv --seed 1\n\n"
    "Example: schoenbat lra train --task text --attention softmax --steps 500 --resume\n\n"
    "Example: torchrun --nproc-per-node 4 -m schoenbat lra train --task text --attention schoenbat "
    "--strategy fsdp"
)
def train(
    task: Annotated[str, typer.Option(help="listops, text, retrieval, pathfinder or image.")],
    attention: Annotated[
        str, typer.Option(help=f"A name, with options as told above: {', '.join(attention_names())}.")
    ],
    seed: Annotated[int, typer.Option(help="Seed of weights, feature maps, batches and dropout.")] = 0,
    data: Annotated[Path, typer.Option(help="Where `schoenbat data prepare` put the data.")] = Path("data"),
    out: Annotated[
        Path, typer.Option(help="Directory of all runs; each has its own inside.", callback=place_for_files)
    ] = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was interrupted.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Only time 200 steps.")] = False,
    shared_device: Annotated[
        bool, typer.Option("--shared-device", help="Other programs use the device: times mean nothing.")
    ] = False,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    devices: Annotated[
        int, typer.Option(min=1, help="How many devices share each batch; torchrun says so itself.")
    ] = 1,
    strategy: Annotated[
        str,
        typer.Option(
            help="How several devices share a model: ddp (each holds all of it) or fsdp (each holds a part "
            "of weights and optimizer). auto: ddp."
        ),
    ] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="Default: bf16-mixed on CUDA, 32-true elsewhere.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Compile with torch.compile. Default: on one CUDA device."
        ),
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 60.0,
    steps: Annotated[int | None, _published("steps")] = None,
    batch_size: Annotated[int | None, _published("batch_size")] = None,
    learning_rate: Annotated[float | None, _published("learning_rate")] = None,
    warmup: Annotated[int | None, _published("warmup", " steps; of other --steps the same share")] = None,
    evaluate_every: Annotated[int | None, _published("evaluate_every", " steps")] = None,
    dropout: Annotated[float | None, _published("dropout")] = None,
    keep_zeros: Annotated[
        bool,
        typer.Option(
            "--keep-zeros",
            help="Let all real positions take part; the paper leaves out every token 0, black pixels too.",
            rich_help_panel="Protocol",
        ),
    ] = False,
) -> None:
    """Train the paper's two-layer model on a task and test it.

    An attention is a name with options, as in `schoenbat:kernel=inv,causal=true`. All take `causal=true`, or
    `causal=both` for half of the heads to look ahead, `rotary=true`, `conv=K` for a convolution over K
    values, and `head_norm=true`. A kernel may be a formula, as in `schoenbat:kernel=(2+x)**2`. An unknown
    option, as in `schoenbat:x=1`, is refused with the names of all that the attention has.

    Weights, optimizer and random state are saved every --checkpoint-seconds and at the end; a run that was
    killed continues with --resume, on any number of devices. Loss and accuracies go to log.jsonl and, where
    installed, TensorBoard; the result, with all that is needed to repeat it, to result.json. Exit code 3: a
    loss was NaN or infinite; 4: another process of the run ended early; 143 and 130: stopped by SIGTERM or
    Ctrl-C after saving.
    """
    from schoenbat.training.claim import claimed
    from schoenbat.training.options import RunOptions, default_precision, runs_on_cuda
    from schoenbat.training.processes import is_first, is_restart, num_processes

    # torchrun starts all processes again when one has failed: they go on where they were.
    resume = resume or is_restart()
    with explained():
        protocol = Protocol.paper(
            task,
            hide_zeros=not keep_zeros,
            **given(
                steps=steps,
                batch_size=batch_size,
                learning_rate=learning_rate,
                warmup=warmup,
                evaluate_every=evaluate_every,
                dropout=dropout,
            ),
        )
        on_cuda = runs_on_cuda(accelerator)
        options = RunOptions(
            task=task,
            attention=attention,
            protocol=protocol,
            seed=seed,
            accelerator=accelerator,
            devices=devices,
            strategy=strategy,
            precision=precision or default_precision(accelerator),
            compiled=on_cuda and num_processes(devices) == 1 if compiled is None else compiled,
            timing=timing,
            alone=not shared_device,
            checkpoint_seconds=checkpoint_seconds,
        )
        directory = run_directory(out, task, attention, seed, timing=timing)
        if resume and (directory / RESULT).exists():
            _refuse_other_result(directory / RESULT, options, data)
            console.print(f"{directory / RESULT} exists: this run is complete", soft_wrap=True)
            return
        loaded = _load(options, data, directory, resume=resume)
        held = claimed(directory) if is_first() else nullcontext()
    with held:
        _train(options, loaded, directory, resume=resume)


def _refuse_other_result(path: Path, options: "RunOptions", data: Path) -> None:
    from schoenbat.data.cache import read_manifest
    from schoenbat.data.errors import DataError
    from schoenbat.training.checkpoint import refuse_other_options

    try:
        result = read_result(path)
    except ValueError as error:
        raise ValueError(f"{error}; delete it, and the run goes on from its checkpoint, if any") from error
    saved, wanted = dict(result.options), json.loads(json.dumps(options.identity))
    with suppress(DataError):  # without the data the result is still what it is
        saved["data"], wanted["data"] = result.record.data, read_manifest(data / options.task).fingerprint
    refuse_other_options(path, {name: saved.get(name) for name in wanted}, wanted)


def _load(options: "RunOptions", data: Path, directory: Path, *, resume: bool) -> "Task":
    """The task, once it is clear that the run can begin."""
    from schoenbat.data import load
    from schoenbat.registry import build_attention
    from schoenbat.training.options import runs_on_cuda
    from schoenbat.training.processes import STRATEGIES, is_first, num_processes, share_of_batch

    choices = {"accelerator": ACCELERATORS, "strategy": STRATEGIES, "precision": PRECISIONS}
    for name, known in choices.items():
        if getattr(options, name) not in known:
            raise ValueError(f"--{name} is one of {', '.join(known)}; got {getattr(options, name)!r}")
    if options.accelerator == "cuda" and not runs_on_cuda("cuda"):
        raise ValueError("there is no GPU that PyTorch can use; leave --accelerator out, or set it to cpu")
    share_of_batch(options.protocol.batch_size, num_processes(options.devices))
    build_attention(options.attention, head_dim=32, num_heads=2, max_length=64)
    begun = find_checkpoint(directory) is not None or (directory / RESULT).exists()
    if begun and not resume and not options.timing:
        raise ValueError(
            f"{directory} holds a run that was begun before; continue it with --resume, choose another "
            "--out, or delete that directory"
        )
    if (directory / RESULT).exists() and not resume and options.timing:
        raise ValueError(
            f"{directory} holds a timing already; choose another --out, or delete that directory"
        )
    if resume and find_checkpoint(directory) is None and is_first():
        console.print(f"{directory} holds nothing to continue: beginning anew", soft_wrap=True)
    directory.mkdir(parents=True, exist_ok=True)
    return load(options.task, data, hide_zeros=options.protocol.hide_zeros)


def _train(options: "RunOptions", task: "Task", directory: Path, *, resume: bool) -> None:
    from schoenbat.report.results import write_results
    from schoenbat.training import run
    from schoenbat.training.checkpoint import CheckpointError
    from schoenbat.training.failure import NonFiniteError
    from schoenbat.training.interruption import Interrupted
    from schoenbat.training.options import runs_on_cuda
    from schoenbat.training.processes import LostProcessError, exit_code, is_first

    with _bar(options) as (bar, on_progress):
        try:
            record = run.train(task, options, directory, resume=resume, on_progress=on_progress)
        except NonFiniteError as error:
            bar.stop()
            if is_first():
                typer.echo(f"{options.task}, {options.attention}, seed {options.seed}: {error}", err=True)
            raise typer.Exit(exit_code(EXIT_NOT_FINITE)) from None
        except Interrupted as stopped:
            bar.stop()
            if is_first():
                kept = "nothing of a timing is kept" if options.timing else "continue with --resume"
                typer.echo(f"{stopped}; {kept}", err=True)
            raise typer.Exit(exit_code(128 + stopped.number)) from None
        except LostProcessError as error:
            bar.stop()
            typer.echo(str(error), err=True)
            raise typer.Exit(EXIT_LOST_PROCESS) from None
        except (CheckpointError, ValueError, OSError) as error:
            if not is_first():
                raise typer.Exit(exit_code(EXIT_USAGE)) from None
            raise typer.BadParameter(str(error)) from error
    if record is not None:
        device = "cuda" if runs_on_cuda(options.accelerator) else "cpu"
        with explained():
            write_results(directory / RESULT, EXPERIMENT, options, [record], device=device)
        _print(record, directory)


@contextmanager
def _bar(options: "RunOptions") -> "Iterator[tuple[Progress, OnProgress]]":
    """A progress bar with the last loss, accuracies and speed, drawn by the first device's process."""
    from schoenbat.training.processes import is_first

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not is_first(),
    )
    total = options.protocol.steps
    if options.timing:
        total = min(total, WARM_STEPS + TIMED_STEPS)
    task = bar.add_task(f"{options.task}, {options.attention}", total=total, status="")
    shown: dict[str, str] = {}

    def on_progress(progress: "TrainingProgress") -> None:
        shown.pop("now", None)
        shown.update(_parts(progress))
        bar.update(task, completed=progress.step, status="  ".join(shown.values()))

    with bar:
        yield bar, on_progress


def _parts(progress: "TrainingProgress") -> dict[str, str]:
    shown = {
        "loss": progress.loss is not None and f"loss {progress.loss:.3f}",
        "accuracy": progress.accuracy is not None and f"train {progress.accuracy:.1%}",
        "validation": progress.validation is not None and f"validation {progress.validation:.1%}",
        "speed": progress.steps_per_second is not None and f"{progress.steps_per_second:.1f} steps/s",
        "now": "waiting while other runs are timed" if progress.is_waiting else EVALUATES[progress.evaluates],
    }
    return {name: text for name, text in shown.items() if text}


def _print(record: "RunRecord", directory: Path) -> None:
    if record.best is not None and record.last is not None:
        console.print(
            f"test accuracy {record.best.test:.2%} (best validation, step {record.best.step:,}), "
            f"{record.last.test:.2%} (last step); always the most frequent label: {record.majority:.2%}",
            highlight=False,
        )
    if record.citations is not None:
        console.print(f"knowing only how often a paper is cited: {record.citations:.2%}", highlight=False)
    memory = "" if record.peak_memory is None else f", {record.peak_memory / 2**20:,.0f} MiB at the peak"
    time = "too few steps to time"
    if record.step_seconds is not None:
        time = f"{record.step_seconds * 1e3:.2f} ms a step over {record.timed_steps:,} steps"
    console.print(f"{time}{memory}, {record.parameters:,} parameters", highlight=False)
    print_files([directory / RESULT])
