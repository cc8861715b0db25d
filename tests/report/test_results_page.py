"""RESULTS.md: every part from its file alone, and where there is no file its command."""

import json
import re
import shlex
from dataclasses import asdict

import pytest
from run_records import RECORD
from typer.main import get_command

from schoenbat.cli import app
from schoenbat.experiments.theorems import TheoremOptions, run
from schoenbat.report.results import write_results
from schoenbat.report.results_page import SECTIONS, Files, make_page
from schoenbat.training.gathered import GATHERED
from schoenbat.training.record import EXPERIMENT
from schoenbat.translation.record import EpochRow


@pytest.fixture
def files(tmp_path):
    (tmp_path / "results").mkdir()
    return Files(tmp_path / "results", tmp_path)


def part(page, name):
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", page, re.DOTALL)[1]


def write_runs(path, *records):
    content = [
        {
            "experiment": EXPERIMENT,
            "finished": "2026-02-03T04:05:06+00:00",
            "machine": {"device": "H200"},
            "options": {"seed": record.seed},
            "rows": [asdict(record)],
        }
        for record in records
    ]
    path.write_text(json.dumps({"experiment": GATHERED, "runs": content}))


def test_without_files_every_part_says_its_command(files):
    page = make_page(files)
    for name, section in SECTIONS.items():
        assert part(page, name).startswith(f"Not run yet: `{section.command}`.")
    assert "*63.31*" in part(page, "lra")
    assert "| base + ppSBN | – | 65.10 |" in part(page, "ablation")


def test_commands_are_there():
    for name, section in SECTIONS.items():
        if section.command.startswith("schoenbat "):
            command, (_, *arguments) = get_command(app), shlex.split(section.command)
            while hasattr(command, "commands"):
                command = command.commands[arguments.pop(0)]
            command.make_context(name, arguments)


def test_error_and_its_figure(files, errors):
    path = files.results / "error.json"
    write_results(path, "error", {}, errors)
    assert "![" not in part(make_page(files), "error")
    path.with_suffix(".svg").write_text("<svg/>")
    shown = part(make_page(files), "error")
    assert shown.startswith("[results/error.json](results/error.json): `")
    assert shown.endswith("![error against D](results/error.svg)")
    assert "| the error falls as D rises | in 0 of 16 steps of D |" in shown


def test_speed(files, speeds):
    write_results(files.results / "speed.json", "speed", {}, speeds)
    shown = part(make_page(files), "speed")
    assert "| exp | 1,000 | 400.0 / 400.0 | 100.0 / 100.0 |" in shown
    benchmarks = files.results.parent / "benchmarks" / "results"
    benchmarks.mkdir(parents=True)
    write_results(benchmarks / "cpu.json", "cpu", {"num_heads": 8, "head_dim": 64}, speeds)
    assert "[benchmarks/results/cpu.json](benchmarks/results/cpu.json)" in part(make_page(files), "cpu")


@pytest.mark.parametrize(
    ("file", "name"), [("lra", "lra"), ("ablation", "ablation"), ("lra-tuning", "tuning")]
)
def test_runs(files, file, name):
    write_runs(files.results / f"{file}.json", RECORD)
    shown = part(make_page(files), name)
    where = f"[results/{file}.json](results/{file}.json)"
    assert shown.startswith(f"{where}: runs, 1 trained, on H200, the last of 2026-02-03.")
    assert {
        "lra": "| softmax | 60.00 |",
        "ablation": "| base | 60.00 |",
        "tuning": "| `softmax` | 10,000 | 70.00 |",
    }[name] in shown


def test_translation(files):
    rows = [EpochRow("softmax", 0, epoch, 2.0, 1.5, 4.48, 30.0, 9.0, 7_000_000) for epoch in (1, 2)]
    rows.append(EpochRow("softmax", 0, 3, 1.9, 1.4, 4.06, 33.0, 9.0, 7_000_000, 34.56, 35.67))
    write_results(files.results / "translate.json", "translate", {}, rows)
    shown = part(make_page(files), "translate")
    assert re.search(r"\| softmax \|.*\| 34\.6 \| 35\.7 \|", shown)


def test_theorems(files):
    options = TheoremOptions.quick(
        num_features=(8,), tail_features=(8,), pair_features=(16,), draws=3, tail_draws=1, pair_draws=3
    )
    write_results(files.results / "theorems.json", "theorems", options, list(run(options)))
    shown = part(make_page(files), "theorems")
    assert shown.count("| --- |") + shown.count("| ---: |") >= 5
    assert "trigh = exp" in shown


def test_the_same_files_give_the_same_page(files, errors):
    write_results(files.results / "error.json", "error", {}, errors)
    assert make_page(files) == make_page(files)


def test_a_damaged_file_is_named(files):
    (files.results / "error.json").write_text("{")
    with pytest.raises(ValueError, match=r"error\.json is no result file"):
        make_page(files)


def test_a_file_without_runs_is_named(files):
    write_runs(files.results / "lra.json")
    with pytest.raises(ValueError, match=r"lra\.json holds no runs; add some with: schoenbat lra gather"):
        make_page(files)
