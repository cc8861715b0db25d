"""Every figure of README.md and RESULTS.md comes from a result file: ``python tests/check_results.py``.

RESULTS.md must be what ``schoenbat report`` writes, and the README's tables what their scripts write, of the
files that are there. A figure anywhere else, which is a number with a point or a unit, stands in figures.toml
with its source.
"""

import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from schoenbat.report.results_page import SECTIONS, Files, make_page

ROOT = Path(__file__).parents[1]
SOURCES = tomllib.loads((ROOT / "tests" / "figures.toml").read_text(encoding="utf-8"))
PAGES = ("README.md", "RESULTS.md")
# Code, links' targets and comments hold no figures.
NO_TEXT = re.compile(r"```.*?^```|`[^`\n]*`|(?<=\])\([^)\s]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(
    r"(?<![\w.,/])\d[\d,]*(?:\.\d+(?:e[-−]?\d+)?|\s?(?:%|×|[KMGT]i?B|[nµm]?s|seconds|minutes|hours|points)(?!\w))"
)


def problems() -> Iterator[str]:
    """What is wrong with the pages as they are."""
    for name in PAGES:
        yield from problems_of(name, (ROOT / name).read_text(encoding="utf-8"))


def problems_of(name: str, page: str) -> Iterator[str]:
    """What is wrong with a page: what is behind its files, then figures without a source."""
    if name == "RESULTS.md":
        if page != make_page(Files(ROOT / "results", ROOT)):
            yield "RESULTS.md is behind the results: run schoenbat report"
        rest = _without_blocks(page)
    else:
        made = {line for lines in _tables().values() for line in lines}
        for title, lines in _tables().items():
            if missing := [line for line in lines if line not in page.splitlines()]:
                yield f"{name}: {title} would write what is not there: {missing[0]}"
        rest = "\n".join(line for line in page.splitlines() if line not in made)
    for source in SOURCES["measured"] + SOURCES["said"]:
        if source["page"] == name:
            text = source["text"].format(_value(source)) if "file" in source else source["text"]
            if not _pattern(text).search(rest):
                yield f"{name} does not say {text!r}, as {source.get('file', 'figures.toml')} has it"
            rest = _pattern(text).sub("", rest)
    yield from _without_source(name, page, rest)


def _without_source(name: str, page: str, rest: str) -> Iterator[str]:
    for line in NO_TEXT.sub("", rest).splitlines():
        for figure in FIGURE.findall(line):
            number = next((i for i, whole in enumerate(page.splitlines(), 1) if line and line in whole), None)
            where = f"{name}:{number}" if number else name
            yield f"{where}: {figure!r} has no source in tests/figures.toml: {line.strip()}"


def _without_blocks(page: str) -> str:
    for name in (*SECTIONS, "identity"):
        page = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", "", page, flags=re.DOTALL)
    return page


@cache
def _tables() -> dict[str, list[str]]:
    """The lines that hold figures, of every table of the README, by what writes it."""
    gpu, cpu = (_load(ROOT / "benchmarks" / name) for name in ("gpu_page.py", "cpu_page.py"))
    measured = json.loads(gpu.GPU.read_text(encoding="utf-8"))["rows"]
    made = {"gpu_page.py": gpu.tables(measured), "cpu_page.py": cpu.tables()}
    return {
        f"benchmarks/{script} ({title})": text.splitlines()[2:]
        for script, tables in made.items()
        for title, text in tables.items()
    }


def _load(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _value(source: dict[str, Any]) -> str:
    """What all rows that fit agree on, as it is written."""
    rows = json.loads((ROOT / source["file"]).read_text(encoding="utf-8"))["rows"]
    wanted = {name: value if isinstance(value, list) else [value] for name, value in source["where"].items()}
    chosen = [row for row in rows if all(row[name] in values for name, values in wanted.items())]
    found = {format(row[source["value"]] / source.get("unit", 1), source["form"]) for row in chosen}
    if len(found) != 1:
        raise ValueError(f"{source['file']} has not one {source['value']!r} where {source['where']}: {found}")
    return found.pop()


def _pattern(text: str) -> re.Pattern[str]:
    """A sentence, wherever its lines break."""
    return re.compile(r"\s+".join(map(re.escape, text.split())))


def main() -> None:
    found = list(problems())
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{', '.join(PAGES)}: {len(found)} problems")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
