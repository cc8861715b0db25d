"""The pages say what is so: code runs, commands parse, tables are the results', every name is there."""

import importlib.util
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import schoenbat
from schoenbat import data
from schoenbat.cli import app
from schoenbat.data import listops

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "RESULTS.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^(?:<!-- needs (.+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What a block may ask for by a comment before it, and whether it is there.
NEEDS = {"a GPU": torch.cuda.is_available(), "prepared data": True}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    need: str | None

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def read_blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start(3)), match[2], match[3], match[1])
        for match in BLOCK.finditer(text)
    ]


BLOCKS = {page: read_blocks(page) for page in PAGES}
PYTHON = {page: [b for b in blocks if b.language == "python"] for page, blocks in BLOCKS.items()}


def run(blocks):
    """One after the other in one namespace; an error names the page and its line."""
    namespace = {"__name__": "__docs__"}
    for block in blocks:
        code = compile("\n" * block.line + block.code, block.page, "exec")
        exec(code, namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if PYTHON[p]], ids=lambda page: page.name)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run([block for block in PYTHON[page] if block.need is None])


@pytest.mark.parametrize("block", [b for page in PAGES for b in PYTHON[page] if b.need], ids=str)
def test_code_that_needs_more_runs_where_it_can(block, tmp_path, monkeypatch):
    if not NEEDS[block.need]:
        pytest.skip(f"needs {block.need}")
    monkeypatch.chdir(tmp_path)
    if block.need == "prepared data":
        prepare_a_little(monkeypatch)
    before = [b for b in PYTHON[block.page] if b.line <= block.line]
    run([b for b in before if b.need in (None, block.need)])


def prepare_a_little(monkeypatch):
    monkeypatch.setattr(listops, "TRAIN_SIZE", 40)
    monkeypatch.setattr(listops, "VALIDATION_SIZE", 2)
    data.prepare("listops", "data", test_size=2)


def commands_of(page):
    """Command lines in blocks, which must be complete, and in the text, which may leave arguments out."""
    for block in BLOCKS[page]:
        if block.language in ("", "sh"):
            yield from ((line, True) for line in block.code.splitlines() if line.startswith("schoenbat "))
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    yield from ((line, False) for line in re.findall(r"`(schoenbat [^`]+)`", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page):
    for line, complete in commands_of(page):
        command, (_, *arguments) = get_command(app), shlex.split(line, comments=True)
        while arguments and hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        try:
            command.make_context(line, arguments)
        except Exception as error:
            missing = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError")
            if complete or not missing:
                raise AssertionError(f"{page.name}: `{line}`: {error.format_message()}") from error


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert targets.issuperset(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)), page.name


def test_tables_are_those_of_the_results():
    specification = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    figures = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(figures)
    for name, shown in figures.tables().items():
        page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert figures.fill(page, shown) == page, f"docs/{name}.md is behind the results: run make docs"


def test_what_python_lists_of_the_package_is_there_for_users():
    listed = dir(schoenbat)
    assert set(schoenbat.__all__) < set(listed)
    assert not {"Any", "import_module", "modules"} & set(listed)
    # Elsewhere, as what some test has imported is there in any case.
    code = "import schoenbat; [getattr(schoenbat, name) for name in dir(schoenbat)]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_in_the_reference():
    from schoenbat.integrations import huggingface

    listed = set(re.findall(r"^::: (.+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE))
    for module in (schoenbat, huggingface, data):
        for name in module.__all__:
            path = f"{module.__name__}.{name}"
            # A module is there by what is in it.
            assert any(entry == path or entry.startswith(f"{path}.") for entry in listed), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_and_files_that_a_page_links_to_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link
