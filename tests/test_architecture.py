"""A file imports only what stands before it in ARCHITECTURE.md."""

import ast
import re
from pathlib import Path

import schoenbat

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "schoenbat"
PACKAGE = schoenbat.__name__


def places():
    """Where each file or folder of the package stands in the one way through."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (way,) = re.findall(r"^\*\*(.*?→.*?)\*\*$", page, re.MULTILINE | re.DOTALL)
    return {name: i for i, names in enumerate(way.split("→")) for name in re.findall(r"\w+", names)}


def imported(path):
    """The files and folders of the package that a file needs at run time, wherever it imports them."""
    for_types = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types.update(ast.walk(node))
        elif isinstance(node, ast.ImportFrom) and node not in for_types:
            assert not node.level, f"{path}: an import says where it is from"
            names = [node.module] if node.module != PACKAGE else [f"{PACKAGE}.{x.name}" for x in node.names]
            yield from (name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}."))
        elif isinstance(node, ast.Import) and node not in for_types:
            yield from (x.name.split(".")[1] for x in node.names if x.name.startswith(f"{PACKAGE}."))


def test_every_file_has_a_place():
    files = {path.stem for path in SOURCE.glob("*.py")}
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert files - {"__init__", "__main__"} | folders == set(places())


def test_files_import_what_stands_before_them():
    order = places()
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own.startswith("__"):
            continue
        for other in imported(path):
            if other in order and other != own:
                assert order[other] < order[own], f"{path.relative_to(ROOT)} imports {other}"
