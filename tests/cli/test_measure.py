"""The command line: help, errors, files, interruption."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import schoenbat
from schoenbat.cli import app
from schoenbat.experiments import comparison, demo, error, speed, theorems


@pytest.fixture
def invoke(tmp_path):
    def call(*arguments):
        return CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)], env={"COLUMNS": "100"})

    return call


@pytest.fixture
def tiny(monkeypatch):
    """Experiments of the smallest size, whatever is asked for."""
    errors = {"head_dims": (6,), "num_features": (4, 8), "num_tokens": 10, "repetitions": 2}
    speeds = {"lengths": (8, 16), "num_features": (2, 4), "head_dim": 4, "num_heads": 1, "seconds": 0.0}
    training = demo.DemoOptions(num_training=32, num_validation=16, steps=2)
    monkeypatch.setattr(error.ErrorOptions, "quick", lambda **more: error.ErrorOptions(**more | errors))
    monkeypatch.setattr(speed.SpeedOptions, "quick", partial(speed.SpeedOptions, **speeds))
    monkeypatch.setattr(
        speed.SpeedOptions,
        "long",
        lambda longest, **more: speed.SpeedOptions(
            **speeds | {"kernels": ("exp",), "num_features": (4,), "rivals": ("sdpa",)} | more
        ),
    )
    small = {"lengths": (16, 32), "num_heads": 2, "head_dim": 8}
    for options, less in [
        (comparison.SpeedComparison, {"seconds": 0.0}),
        (comparison.ErrorComparison, {"repetitions": 2}),
    ]:
        monkeypatch.setattr(options, "quick", partial(options, **small | less))
    monkeypatch.setattr(demo, "DemoOptions", lambda seed: training)


@pytest.mark.parametrize("command", ["error", "speed", "demo"])
def test_help_shows_an_example(command):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert f"Example: schoenbat {command}" in result.output
    assert "--out" in result.output


def test_without_a_command_the_commands_are_listed():
    result = CliRunner().invoke(app, [], env={"COLUMNS": "100"})
    assert all(f" {command} " in result.output for command in ("error", "speed", "demo"))


def test_the_version_is_told():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"{schoenbat.__version__}\n")


SEEDED = (["error"], ["speed"], ["theorems"], ["demo"], ["speed", "--attentions", "mean"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["error", "--fast"], "--fast"),
        (["error", "--kernels", "exp,foo"], "foo"),
        (["error", "--repetitions", "1"], "repetitions"),
        *(([*command, "--seed", "99999999999999999999"], "at most 64 bits") for command in SEEDED),
        (["speed", "--device", "toaster"], "toaster"),
        (["speed", "--attentions", "softmax,foo"], "known are softmax"),
        (["error", "--attentions", "rfa:colour=3"], "colour"),
        (["error", "--attentions", "all", "--kernels", "exp"], "--kernels"),
        (["speed", "--attentions", "all", "--long"], "--long"),
    ],
)
def test_wrong_options_are_named_without_a_traceback(invoke, tmp_path, arguments, problem):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert problem in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("arguments", "name", "num_rows", "shown"),
    [
        (["error", "--quick", "--kernels", "exp,inv, exp"], "error", 2 * 4 * 2, "exact-low"),
        (["speed", "--quick", "--kernels", "inv"], "speed", 2 * 2 * 4, "bwd ms"),
        (["speed", "--quick", "--long"], "speed-long", 2 * 2 * 2, "faster than SDPA"),
        (["speed", "--quick", "--attentions", "softmax,rfa"], "speed-attentions", 2 * 2 * 2, "growth"),
        (
            ["error", "--quick", "--attentions", "mean", "--attentions", "schoenbat:post=false,seed=1"],
            "error-attentions",
            2 * 2,
            "* approximates something else",
        ),
    ],
)
def test_experiments_print_tables_and_write_json_and_svg(invoke, tmp_path, arguments, name, num_rows, shown):
    result = invoke(*arguments, "--seed", "5")
    assert result.exit_code == 0, result.output
    assert shown in result.output
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json", f"{name}.svg"}
    results = json.loads((tmp_path / f"{name}.json").read_text())
    assert results["experiment"] == name
    assert results["options"]["seed"] == 5
    assert len(results["rows"]) == num_rows
    assert "</svg>" in (tmp_path / f"{name}.svg").read_text()


@pytest.mark.usefixtures("tiny")
def test_demo_shows_everything_and_a_summary(invoke, tmp_path):
    result = invoke("demo")
    assert result.exit_code == 0, result.output
    assert all(
        text in result.output for text in ("paper", "RMFA", "schoenbat", "most frequent label", "Summary")
    )
    parts = ("demo-error", "demo-speed", "demo-training")
    files = {f"{part}.{ending}" for part in parts for ending in ("json", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == files
    rows = json.loads((tmp_path / "demo-training.json").read_text())["rows"]
    assert [row["attention"] for row in rows] == ["softmax", "schoenbat", "mean"]
    assert rows[0]["history"][-1]["step"] == 2


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("experiment", [error, speed, theorems])
def test_an_interruption_ends_with_130_and_leaves_no_file(invoke, tmp_path, monkeypatch, experiment):
    def interrupted(options):
        yield from []
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run", interrupted)
    result = invoke(experiment.__name__.rpartition(".")[2], "--quick")
    assert result.exit_code == 130
    assert "Traceback" not in result.output
    assert result.stderr == "stopped: nothing was written\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tiny")
def test_an_interrupted_demo_keeps_the_parts_that_were_measured(invoke, tmp_path, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "listops_task", interrupted)
    result = invoke("demo")
    assert result.exit_code == 130
    assert result.stderr == "stopped: parts that came to their end are written, this one is not\n"
    assert {path.stem for path in tmp_path.iterdir()} == {"demo-error", "demo-speed"}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_stopped_in_training_says_so_too(invoke, tmp_path, monkeypatch, number, code):
    train_one = demo.train_one

    def stopped(name, task, options, on_step):
        return train_one(name, task, options, lambda step: signal.raise_signal(number))

    monkeypatch.setattr(demo, "train_one", stopped)
    result = invoke("demo")
    assert result.exit_code == code
    assert result.stderr == "stopped: parts that came to their end are written, this one is not\n"
    assert {path.stem for path in tmp_path.iterdir()} == {"demo-error", "demo-speed"}


@pytest.mark.parametrize("module", ["typer", "matplotlib"])
def test_a_missing_extra_is_named(module):
    code = f"import sys; sys.modules[{module!r}] = None; from schoenbat.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"need {module}; install them with: pip install '.[cli]' in a checkout" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_terminal_that_knows_ascii_alone_shows_what_it_can():
    result = subprocess.run(
        [sys.executable, "-m", "schoenbat", "error", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"softmax(QK?/" in result.stdout


@pytest.mark.parametrize("command", ["error", "speed", "theorems", "demo", "translate"])
def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_measured(command, tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, [command, "--out", str(tmp_path / "file" / "deeper")])
    assert result.exit_code == 2
    assert "is a file; choose a directory" in " ".join(result.output.replace("│", "").split())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no folder in which root cannot write")
@pytest.mark.parametrize("command", ["error", "speed", "theorems", "demo", "translate"])
def test_a_place_where_nobody_may_make_a_folder_is_refused_as_early(command):
    result = CliRunner().invoke(app, [command, "--out", "/proc/x"])
    assert result.exit_code == 2
    shown = " ".join(result.output.replace("│", "").split())
    assert "Invalid value for '--out': /proc/x cannot be written" in shown


def test_a_link_to_nowhere_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    result = CliRunner().invoke(app, ["error", "--out", str(link)])
    assert result.exit_code == 2
    assert "is a link to nowhere" in " ".join(result.output.replace("│", "").split())
