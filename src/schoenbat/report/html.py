"""A page of Markdown as one HTML file that needs nothing else: plots inside, tables that can be sorted."""

import base64
import os
import re
from html import escape, unescape
from importlib import resources
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

MARKER = re.compile(r"^<!-- .* -->$", re.MULTILINE)
IMAGE = re.compile(r'<p><img alt="([^"]*)" src="([^"]+)" /></p>')
LINK = re.compile(r'(?<=<a href=")([^"#][^"]*)(?=")')
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head>
<body>
<main>
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""


def make_html(page: str, home: Path, place: Path) -> str:
    """The page as HTML.

    Args:
        page: Markdown.
        home: the directory that its links and images are relative to.
        place: the directory in which the HTML file will lie; links to files lead there.
    """
    try:
        import markdown
    except ModuleNotFoundError as missing:
        raise ValueError(
            "an HTML page needs markdown; install it with: pip install '.[cli]' in a checkout"
        ) from missing
    extensions = ["tables", "fenced_code", "toc"]
    converter = markdown.Markdown(extensions=extensions, extension_configs={"toc": {"toc_depth": "2-2"}})
    body = converter.convert(MARKER.sub("", page))
    body = IMAGE.sub(lambda match: _plot(home / unquote(unescape(match[2])), match[1]), body)
    body = LINK.sub(lambda match: _moved(match[1], home, place), body)
    body = body.replace("<table>", '<div class="wide" tabindex="0">\n<table>').replace(
        "</table>", "</table>\n</div>"
    )
    title = re.search("<h1[^>]*>(.*?)</h1>", body)
    body = body.replace("</h1>", f"</h1>\n<nav>{converter.toc}</nav>", 1)
    return PAGE.format(
        title=title[1] if title else "Results",
        css=_source("results.css"),
        body=body,
        script=_source("results.js"),
    )


def _plot(path: Path, what: str) -> str:
    """An image inside of the page, where its names cannot meet those of others; ``what`` is HTML already."""
    drawn = base64.b64encode(path.read_bytes()).decode()
    image = f'<img alt="{what}" src="data:image/svg+xml;base64,{drawn}">'
    return f'<figure class="plot" tabindex="0">{image}</figure>'


def _moved(target: str, home: Path, place: Path) -> str:
    parts = urlsplit(unescape(target))
    if parts.scheme:
        return target
    path = Path(os.path.relpath(home / unquote(parts.path), place)).as_posix()
    return escape(urlunsplit(parts._replace(path=quote(path))))


def _source(name: str) -> str:
    return resources.files("schoenbat.report").joinpath(name).read_text(encoding="utf-8")
