"""The command that checks the paper's theorems."""

from pathlib import Path

import typer

from schoenbat.cli.measure import Out, Quick, Seed
from schoenbat.cli.terminal import OF_THE_PAPER, console, explained, print_files, stoppable, track, write

app = typer.Typer()


@app.command(rich_help_panel=OF_THE_PAPER, epilog="Example: schoenbat theorems --quick")
@stoppable()
def theorems(quick: Quick = False, seed: Seed = 0, out: Out = Path("out")) -> None:
    """Measure what the paper's theorems claim: unbiasedness, the error bound, the kernels, post-SBN.

    How far RMFA is from attention on average over thousands of maps, and its numerator and denominator apart;
    the bound on its error beside how often it errs; how different attention is with each of the five kernels;
    and whether γ · att^β restores attention after pre-SBN. Two to three minutes.
    """
    from schoenbat.experiments.theorems import TheoremOptions, run
    from schoenbat.report.plots import theorem_plot
    from schoenbat.report.theorems import theorem_tables

    with explained():
        options = (TheoremOptions.quick if quick else TheoremOptions)(seed=seed)
    rows = track(run(options), options.total, "theorems")
    for table in theorem_tables(rows):
        console.print(table)
    print_files(write(out / "theorems", options, rows, theorem_plot(rows)))
