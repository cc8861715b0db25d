"""The commands over many training runs: sweep, gather, table."""

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TaskID

from schoenbat.cli.terminal import console, explained, place_for_files, print_files, progress_bar, split_names
from schoenbat.cli.train import train
from schoenbat.experiments.groups import GROUPS, Group, find_group

if TYPE_CHECKING:
    from schoenbat.training.cells import Cell, SweepOptions
    from schoenbat.training.sweep import Event

app = typer.Typer()


@app.command(
    epilog="Example: schoenbat lra sweep --tasks text,listops --attentions softmax,rfa "
    "--attentions schoenbat:kernel=inv,causal=true --seeds 3 --jobs 4 --budget 9m\n\n"
    "Example: schoenbat lra sweep --attentions all --attentions softmax:naive=true --timing\n\n"
    "Example: schoenbat lra sweep --group main --jobs 5 --budget 9m --known results/lra.json"
)
def sweep(
    attentions: Annotated[
        list[str] | None,
        typer.Option(
            help="'all', or names separated by commas, with options as in 'schoenbat:kernel=inv,post=false'. "
            "May be repeated."
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help=f"Attentions, tasks, seeds and steps of a comparison: {', '.join(GROUPS)}."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks, separated by commas. Default: all five.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Train with seeds 0 to SEEDS - 1. Default: 1.")] = None,
    jobs: Annotated[
        int,
        typer.Option(
            help="Runs at once. Times of runs at once are not compared; with --timing on a GPU they set up "
            "at once, and are timed one at a time."
        ),
    ] = 1,
    budget: Annotated[
        str | None,
        typer.Option(help="End everything within this time: 540, 9m, 1h30m. Runs keep what they reached."),
    ] = None,
    timing: Annotated[
        bool, typer.Option("--timing", help="Time 200 steps of each task and attention, one after the other.")
    ] = False,
    data: Annotated[Path, typer.Option(help="Directory of the tasks' data.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Directory of the runs.", callback=place_for_files)] = Path(
        "runs"
    ),
    known: Annotated[
        Path | None, typer.Option(help="A file by 'lra gather': the runs in it are done already.")
    ] = None,
    train_option: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE for --KEY VALUE of 'schoenbat lra train', or KEY for a flag. May be repeated."
        ),
    ] = None,
) -> None:
    """Train what is missing of tasks × attentions × seeds; the same command again goes on where it ended.

    The exit code is 1 if a run failed, and 0 if all are done or the budget is spent.
    """
    from schoenbat.data import catalogue
    from schoenbat.training.cells import SweepOptions, why_unknown
    from schoenbat.training.gathered import read_runs
    from schoenbat.training.sweep import parse_duration, unfinished

    with explained():
        chosen = _choose(attentions, group)
        options = SweepOptions(
            tasks=chosen.tasks if tasks is None else split_names(tasks) or (),
            attentions=tuple(chosen.attentions.values()),
            seeds=chosen.seeds if seeds is None else seeds,
            jobs=jobs,
            timing=timing,
            data=data,
            out=out,
            known=known,
            train_options=_train_options(chosen, train_option or []),
            **({"budget": parse_duration(budget)} if budget else {}),
        )
        missing = unfinished(options)
        for task in dict.fromkeys(cell.task for cell in missing):
            catalogue.require(task, data)
        if known is not None:
            runs = read_runs(known)[0]
            reasons = Counter(why_unknown(cell, options, runs) for cell in missing)
            for reason, count in reasons.items():
                if reason is not None:
                    run, do = ("run", "does") if count == 1 else ("runs", "do")
                    console.print(f"{count} {run} of {known} {do} not count: {reason}", highlight=False)
    if not _show(options, missing):
        raise typer.Exit(1)


def _train_options(group: Group, texts: list[str]) -> tuple[tuple[str, str], ...]:
    """What was given; for what was not, the group's own."""
    from schoenbat.training.cells import FLAGS, parse_train_option

    given = dict(parse_train_option(text) for text in texts)
    known = {name.replace("_", "-") for name in signature(train).parameters} - {"compiled"} | set(FLAGS)
    for name in given:
        if name not in known:
            raise ValueError(f"'lra train' has no option --{name}; see: schoenbat lra train --help")
    own = {} if group.steps is None else {"steps": str(group.steps)}
    return tuple((own | given).items())


def _choose(attentions: list[str] | None, group: str | None) -> Group:
    from schoenbat.registry import parse_attentions

    if attentions and group is None:
        return Group({text: text for text in parse_attentions(attentions)})
    if group is None or attentions:
        raise ValueError("say what is trained: either --attentions or --group")
    return find_group(group)


@app.command(epilog="Example: schoenbat lra gather --runs runs --into results/lra.json")
def gather(
    into: Annotated[Path, typer.Option(help="The file to add the results to.")],
    runs: Annotated[
        Path, typer.Option(help="Directory of the runs, or a file that was gathered elsewhere.")
    ] = Path("runs"),
) -> None:
    """Add the results of all runs to one small file, which tables and sweeps read in place of the runs."""
    from schoenbat.training import gathered

    with explained():
        added, count = gathered.gather(runs, into)
    console.print(f"runs: {added} new or renewed, {count} in the file", highlight=False)
    print_files([into])


@app.command(epilog="Example: schoenbat lra table --runs results/lra.json --out out")
def table(
    runs: Annotated[Path, typer.Option(help="Directory of the runs, or a file by 'lra gather'.")] = Path(
        "runs"
    ),
    out: Annotated[
        Path, typer.Option(help="Directory for lra-table.md and lra-table.json.", callback=place_for_files)
    ] = Path("out"),
) -> None:
    """Accuracy, time and memory of all runs by task and attention, beside the paper's figures.

    Attentions have the names of 'lra sweep --group'; the files have them in full, with more of each.
    """
    from schoenbat.files import write_atomically
    from schoenbat.report.lra import collect
    from schoenbat.report.lra_tables import accuracy_table, cost_table, markdown
    from schoenbat.report.results import write_results

    with explained():
        collected = collect(runs)
    console.print(accuracy_table(collected))
    console.print()
    console.print(cost_table(collected))
    for note in collected.notes:
        console.print(f"• {note}", highlight=False)
    files = [out / "lra-table.md", out / "lra-table.json"]
    options = {"runs": str(runs), "timed_on": collected.timed_on, "notes": collected.notes}
    with explained():
        write_atomically(files[0], markdown(collected))
        write_results(files[1], "lra-table", options, [*collected.rows, *collected.averages])
    print_files(files)


def _show(options: "SweepOptions", missing: "Sequence[Cell]") -> bool:
    """Run the missing cells of a sweep under the eyes of the user; whether nothing failed."""
    from schoenbat.training import sweep as training

    names = {training.Finished: "finished", training.Failed: "failed", training.Skipped: "skipped"}
    counts = dict.fromkeys(names.values(), 0)
    with progress_bar() as progress, _termination_as_interruption():
        view = _View(progress, options)
        try:
            with closing(training.run(options, missing=missing)) as events:
                for event in events:
                    view.show(event)
                    if isinstance(event, training.OutOfBudget):
                        counts |= {"stopped": len(event.stopped), "not begun": len(event.waiting)}
                    elif type(event) in names:
                        counts[names[type(event)]] += 1
        except KeyboardInterrupt:
            progress.stop()
            kept = "what was timed is kept" if options.timing else "runs keep what they reached"
            typer.echo(f"stopped: {kept}, the same command goes on from there", err=True)
            raise
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    console.print(f"cells: {told}, of {len(options.cells)}", highlight=False)
    return counts["failed"] == 0


class _View:
    """One bar for all cells and one for each that runs; what ends is a line above them."""

    def __init__(self, progress: Progress, options: "SweepOptions") -> None:
        self.progress, self.options = progress, options
        self.all = progress.add_task("all cells", total=len(options.cells))
        self.bars: dict[Cell, TaskID] = {}

    def show(self, event: "Event") -> None:
        from schoenbat.training.sweep import DONE, Failed, Finished, OutOfBudget, Progressed, Skipped, Started

        match event:
            case Started(cell, resumed):
                total = None if cell.timing else self.options.steps(cell.task)
                self.bars[cell] = self.progress.add_task(str(cell), total=total)
                self._say(f"{'continued' if resumed else 'started'}: {cell}")
            case Progressed(cell, step, loss, validation):
                known = {"loss": loss, "validation": validation}
                words = [f"{name} {value:.3f}" for name, value in known.items() if value is not None]
                description = " ".join([str(cell), *words])
                self.progress.update(self.bars[cell], completed=step or 0, description=description)
            case Finished(cell, seconds):
                self._end(cell, f"finished: {cell} in {seconds:.0f} s")
            case Failed(cell, message, path):
                self._end(cell, f"failed: {cell}: {message} (more in {path})")
            case Skipped(cell, reason):
                self._end(cell, None if reason == DONE else f"skipped: {cell}: {reason}")
            case OutOfBudget(stopped, waiting):
                self._say(
                    f"out of budget: {len(stopped)} stopped, {len(waiting)} not begun; "
                    "the same command goes on where this one ended"
                )
        self.progress.refresh()

    def _end(self, cell: "Cell", line: str | None) -> None:
        if cell in self.bars:
            self.progress.remove_task(self.bars.pop(cell))
        self.progress.advance(self.all)
        if line:
            self._say(line)

    def _say(self, line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def _termination_as_interruption() -> Iterator[None]:
    """Inside, a request to end (SIGTERM, a closed terminal) is what Ctrl-C is: runs save and end first."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signals = signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, interrupt) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
