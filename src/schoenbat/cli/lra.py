"""The commands around the Long Range Arena: train, sweep, gather, table."""

import typer

from schoenbat.cli import sweep, train

app = typer.Typer(
    no_args_is_help=True,
    help="The Long Range Arena: train one attention on one task, or all on all.",
    epilog="Example: schoenbat lra train --task listops --attention schoenbat --steps 50 --batch-size 4",
)
app.add_typer(train.app)
app.add_typer(sweep.app)
