"""The command that writes the page of results."""

from pathlib import Path
from typing import Annotated

import typer

from schoenbat.cli.terminal import OF_THE_PAPER, explained, print_files

app = typer.Typer()


@app.command(
    rich_help_panel=OF_THE_PAPER,
    epilog="Example: schoenbat report\n\n"
    "Example: schoenbat report --results out --out out/RESULTS.md --html out/results.html",
)
def report(
    results: Annotated[Path, typer.Option(help="Directory of the result files.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("RESULTS.md"),
    html: Annotated[
        Path | None, typer.Option(help="Also write it as one HTML file with tables that can be sorted.")
    ] = None,
) -> None:
    """Put what was measured beside what the paper prints: all result files as one page.

    A result that is not there gives a part that says so, with the command that makes it.
    """
    from schoenbat.files import write_atomically
    from schoenbat.report.results_page import Files, make_page

    with explained():
        if not results.is_dir():
            raise ValueError(f"there is no directory {str(results)!r}; run it where the results are")
        page = make_page(Files(results, out.parent))
        write_atomically(out, page)
        if html is not None:
            from schoenbat.report.html import make_html

            write_atomically(html, make_html(page, out.parent, html.parent))
    print_files([out] if html is None else [out, html])
