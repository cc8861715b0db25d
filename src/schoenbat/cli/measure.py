"""The commands that measure: error, speed, demo."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schoenbat.cli.terminal import (
    ON_THIS_MACHINE,
    advance,
    console,
    explained,
    given,
    place_for_files,
    print_files,
    progress_bar,
    split_names,
    stoppable,
    track,
    write,
)

if TYPE_CHECKING:
    from schoenbat.experiments.comparison import ErrorComparison, SpeedComparison
    from schoenbat.experiments.demo import DemoOptions, DemoRow
    from schoenbat.experiments.error import ErrorOptions, ErrorRow
    from schoenbat.experiments.speed import SpeedOptions, SpeedRow

app = typer.Typer()

Quick = Annotated[
    bool, typer.Option("--quick", help="A small part of the experiment, in less than a minute.")
]
Out = Annotated[Path, typer.Option(help="Directory for the JSON and SVG files.", callback=place_for_files)]
Seed = Annotated[int, typer.Option(help="Seed of inputs and feature maps.")]
Kernels = Annotated[
    str | None, typer.Option(help="Of exp, inv, logi, trigh, sqrt, separated by commas. Default: all.")
]

Attentions = Annotated[
    list[str] | None,
    typer.Option(
        help="Compare attentions instead: 'all', or names separated by commas, with options as in "
        "'schoenbat:kernel=inv,post=false'. May be repeated."
    ),
]


@app.command(rich_help_panel=ON_THIS_MACHINE, epilog="Example: schoenbat demo --seed 1 --out demo")
@stoppable("parts that came to their end are written, this one is not")
def demo(seed: Seed = 0, out: Out = Path("out")) -> None:
    """Error, speed, and a classifier trained with softmax and with SchoenbAt, in some minutes."""
    from schoenbat.experiments.demo import DemoOptions
    from schoenbat.experiments.error import ErrorOptions
    from schoenbat.experiments.speed import SpeedOptions
    from schoenbat.report.tables import demo_summary

    with explained():
        error_options = ErrorOptions.quick(
            kernels=("exp",), head_dims=(32, 64), num_features=(32, 64, 128), seed=seed
        )
    errors, error_files = _measure_error(error_options, out / "demo-error")
    speeds, speed_files = _measure_speed(SpeedOptions.long(longest=4096, seed=seed), out / "demo-speed")
    trained, training_files = _train(DemoOptions(seed=seed), out / "demo-training")
    console.rule("Summary")
    for line in demo_summary(errors, speeds, trained):
        console.print(f"• {line}", highlight=False)
    print_files([*error_files, *speed_files, *training_files])


@app.command(
    rich_help_panel=ON_THIS_MACHINE,
    epilog="Example: schoenbat error --quick --kernels exp,inv\n\n"
    "Example: schoenbat error --attentions all --attentions schoenbat:construction=exact-low",
)
@stoppable()
def error(
    quick: Quick = False,
    kernels: Kernels = None,
    attentions: Attentions = None,
    repetitions: Annotated[
        int | None, typer.Option(min=2, help="How many inputs and maps are averaged in each cell.")
    ] = None,
    seed: Seed = 0,
    out: Out = Path("out"),
) -> None:
    """How far RMFA is from exact kernelized attention, for every construction of the feature map.

    With --attentions: how far each attention is from softmax on the same inputs, over the length n, as a
    share of what plain averaging is off. Reformer, Skyformer, cosFormer, RFA, mean and none approximate
    something else than softmax(QKᵀ/√d), or nothing: for them it is a distance, no approximation error. The
    logits are 4 times a cosine; a bare schoenbat has that scale and no post-SBN.
    """
    from schoenbat.experiments.comparison import ErrorComparison
    from schoenbat.experiments.error import ErrorOptions
    from schoenbat.registry import parse_attentions

    if attentions:
        with explained():
            _refuse_with_attentions(kernels=kernels)
            comparison = (ErrorComparison.quick if quick else ErrorComparison)(
                **given(attentions=parse_attentions(attentions), repetitions=repetitions, seed=seed)
            )
        print_files(_compare_error(comparison, out / "error-attentions"))
        return
    with explained():
        options = (ErrorOptions.quick if quick else ErrorOptions)(
            **given(kernels=split_names(kernels), repetitions=repetitions, seed=seed)
        )
    print_files(_measure_error(options, out / "error")[1])


@app.command(
    rich_help_panel=ON_THIS_MACHINE,
    epilog="Example: schoenbat speed --long --device cuda\n\n"
    "Example: schoenbat speed --quick --attentions all",
)
@stoppable()
def speed(
    quick: Quick = False,
    long: Annotated[
        bool,
        typer.Option(
            "--long", help="Up to 131,072 tokens, for the crossover with SDPA; some minutes on a CPU."
        ),
    ] = False,
    kernels: Kernels = None,
    attentions: Attentions = None,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Skip what would take longer than this many seconds per call.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Seed = 0,
    out: Out = Path("out"),
) -> None:
    """How fast RMFA is beside exact kernelized attention and SDPA, and how much memory each takes.

    RMFA has the map exact-low here. With unbiased, which SchoenbAt has by default, it takes longer: compare
    modules by --attentions softmax,schoenbat. On a GPU in bfloat16, by the replay of a CUDA graph: a plain
    call also takes Python's time.

    With --attentions: time, memory and their growth with the length n, of a plain call of each attention.
    """
    from schoenbat.experiments.comparison import SpeedComparison
    from schoenbat.experiments.speed import SpeedOptions
    from schoenbat.registry import parse_attentions

    chosen = given(kernels=split_names(kernels), budget=budget, device=device, seed=seed)
    if attentions:
        with explained():
            _refuse_with_attentions(kernels=kernels, long=long)
            comparison = (SpeedComparison.quick if quick else SpeedComparison)(
                attentions=parse_attentions(attentions), **chosen
            )
        print_files(_compare_speed(comparison, out / "speed-attentions"))
        return
    with explained():
        if long:
            options = SpeedOptions.long(longest=4096 if quick else 131_072, **chosen)
        else:
            options = (SpeedOptions.quick if quick else SpeedOptions)(**chosen)
    print_files(_measure_speed(options, out / ("speed-long" if long else "speed"))[1])


def _measure_error(options: "ErrorOptions", path: Path) -> "tuple[list[ErrorRow], list[Path]]":
    from schoenbat.experiments import error as experiment
    from schoenbat.report import plots, tables

    rows = track(experiment.run(options), options.total, "error")
    for table in tables.error_tables(rows):
        console.print(table)
    return rows, write(path, options, rows, plots.error_plot(rows))


def _measure_speed(options: "SpeedOptions", path: Path) -> "tuple[list[SpeedRow], list[Path]]":
    from schoenbat.experiments import speed as experiment
    from schoenbat.report import plots, tables

    rows = track(experiment.run(options), options.total, "speed")
    for table in tables.speed_tables(rows):
        console.print(table)
    # With one number of features the length is what varies, and there is a crossover to look for.
    if len(options.num_features) == 1:
        for line in tables.crossover_lines(rows):
            console.print(line)
        return rows, write(path, options, rows, plots.length_plot(rows), options.device)
    return rows, write(path, options, rows, plots.speedup_plot(rows), options.device)


def _compare_error(options: "ErrorComparison", path: Path) -> list[Path]:
    from schoenbat.experiments import comparison as experiment
    from schoenbat.report import plots, tables

    rows = track(experiment.run_error(options), options.total, "error")
    console.print(tables.attention_error_table(rows))
    return write(path, options, rows, plots.attention_error_plot(rows))


def _compare_speed(options: "SpeedComparison", path: Path) -> list[Path]:
    from schoenbat.experiments import comparison as experiment
    from schoenbat.report import plots, tables

    rows = track(experiment.run_speed(options), options.total, "speed")
    console.print(tables.attention_speed_table(rows))
    return write(path, options, rows, plots.attention_speed_plot(rows), options.device)


def _train(options: "DemoOptions", path: Path) -> "tuple[list[DemoRow], list[Path]]":
    from schoenbat.experiments.demo import listops_task, train_one
    from schoenbat.report import plots, tables

    data = listops_task(options)
    rows = []
    with progress_bar() as progress:
        tasks = [
            progress.add_task(f"training with {name}", start=False, total=options.steps)
            for name in options.attentions
        ]
        for name, task in zip(options.attentions, tasks, strict=True):
            progress.start_task(task)
            rows.append(train_one(name, data, options, partial(advance, progress, task)))
    console.print(tables.demo_table(rows))
    return rows, write(path, options, rows, plots.training_plot(rows))


def _refuse_with_attentions(**others: object) -> None:
    for name, value in others.items():
        if value:
            raise ValueError(f"--attentions and --{name} are two experiments; choose one")
