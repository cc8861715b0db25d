"""The command that checks the theorems: help, tables, files."""

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from schoenbat.cli import app
from schoenbat.experiments import theorems


@pytest.fixture
def tiny(monkeypatch):
    fewer = {
        "num_features": (8, 16),
        "draws": 4,
        "tail_features": (8,),
        "pair_features": (8,),
        "pair_draws": 3,
    }
    monkeypatch.setattr(
        theorems.TheoremOptions, "quick", partial(theorems.TheoremOptions, **fewer, kernel_tokens=16)
    )


def invoke(*arguments):
    return CliRunner().invoke(app, ["theorems", *arguments], env={"COLUMNS": "100"})


def test_help_shows_an_example():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Example: schoenbat theorems" in result.output
    assert all(option in result.output for option in ("--quick", "--seed", "--out"))


@pytest.mark.usefixtures("tiny")
def test_every_check_is_shown_and_written(tmp_path):
    result = invoke("--quick", "--seed", "3", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    shown = ("denominator", "says nothing", "trigh = exp", "right side", "best γ and β")
    assert [text for text in shown if text not in result.output] == []
    assert {path.name for path in tmp_path.iterdir()} == {"theorems.json", "theorems.svg"}
    results = json.loads((tmp_path / "theorems.json").read_text())
    assert results["experiment"] == "theorems"
    assert results["options"]["seed"] == 3
    checks = {row["check"] for row in results["rows"]}
    assert checks == {"bias", "tail", "kernels", "formula", "restoring"}
    assert "</svg>" in (tmp_path / "theorems.svg").read_text()
