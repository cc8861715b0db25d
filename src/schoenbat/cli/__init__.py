"""The command ``schoenbat``."""

import importlib.util
import io
import sys
from typing import Annotated

INSTALL = "schoenbat's commands need {}; install them with: pip install '.[cli]' in a checkout"

try:
    import typer

    import schoenbat
    from schoenbat.cli import data, lra, measure, report, theorems, translate
    from schoenbat.cli.terminal import OF_THE_PAPER
except ModuleNotFoundError as missing:
    raise SystemExit(INSTALL.format(missing.name)) from None

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Attention in linear time: what it costs in accuracy and what it saves, measured on this machine.",
    epilog="Example: schoenbat demo",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(schoenbat.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


app.add_typer(measure.app)
app.add_typer(theorems.app)
app.add_typer(data.app, name="data", rich_help_panel=OF_THE_PAPER)
app.add_typer(lra.app, name="lra", rich_help_panel=OF_THE_PAPER)
app.add_typer(translate.app)
app.add_typer(report.app)


def main() -> None:
    """Run the command line."""
    missing = [
        name for name in ("lightning", "matplotlib", "numpy") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise SystemExit(INSTALL.format(" and ".join(missing)))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal cannot show must not cost what took minutes to measure.
            stream.reconfigure(errors="replace")
    app()
