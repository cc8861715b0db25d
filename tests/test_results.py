"""README.md and RESULTS.md say what the result files say."""

import re

import pytest
from check_results import ROOT, problems, problems_of
from typer.testing import CliRunner

from schoenbat.cli import app


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_figure_comes_from_a_file():
    assert not list(problems())


def changed(page, figure):
    """The page with the first digit after a figure's point changed."""
    other = re.sub(r"(?<=\.)\d", lambda digit: str((int(digit[0]) + 1) % 10), figure, count=1)
    assert figure in page
    return page.replace(figure, other, 1)


@pytest.mark.parametrize("kind", ["KiB", "cell"])
def test_a_changed_digit_is_seen(kind):
    page = read("README.md")
    pattern = r"\d+\.\d KiB" if kind == "KiB" else r"(?<=\| )\d+\.\d+(?= \|)"
    for figure in dict.fromkeys(re.findall(pattern, page)):
        assert list(problems_of("README.md", changed(page, figure))), figure


@pytest.mark.parametrize(
    "sentence", ["It is 3.4 times as fast.", "It gains 12 %.", "A call takes 7 ms.", "| softmax | 63.31 |"]
)
@pytest.mark.parametrize("name", ["README.md", "RESULTS.md"])
def test_a_figure_without_a_source_is_seen(name, sentence):
    found = list(problems_of(name, f"{read(name)}\n{sentence}\n"))
    assert any("has no source" in problem for problem in found)


def test_a_hand_that_changes_results_is_seen():
    page = read("RESULTS.md")
    assert "run schoenbat report" in next(problems_of("RESULTS.md", page.replace("*63.31*", "*63.41*")))
    assert next(problems_of("RESULTS.md", page.replace("## Theorems", "## The theorems")))


def test_counts_and_code_are_no_figures():
    page = read("README.md")
    assert not list(problems_of("README.md", f"{page}\nWith 1,024 tokens, `scale=0.5` and D = 128.\n"))


def test_the_command_writes_the_page(tmp_path):
    out, html = tmp_path / "RESULTS.md", tmp_path / "results.html"
    done = CliRunner().invoke(
        app, ["report", "--results", str(ROOT / "results"), "--out", str(out), "--html", str(html)]
    )
    assert done.exit_code == 0, done.output
    assert out.read_text(encoding="utf-8").startswith("# Results\n")
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_directory_that_is_not_there_is_named(tmp_path):
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "nothing")])
    assert done.exit_code == 2
    assert "there is no directory" in done.output
