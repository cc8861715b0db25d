"""The commands ``schoenbat data``: prepare and list tasks, errors, interruption."""

import os
import signal
import subprocess
import sys
import time

import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from schoenbat import data
from schoenbat.cli import app
from schoenbat.cli.terminal import console
from schoenbat.data import listops


@pytest.fixture
def invoke(tmp_path):
    def call(*arguments):
        command = ["data", *map(str, arguments), "--data", str(tmp_path / "root")]
        return CliRunner().invoke(app, command, env={"COLUMNS": "100"})

    return call


@pytest.fixture
def papers(tmp_path):
    tables = {
        "aan_papers": {"id": ["A", "B"], "text": ["one", "two"]},
        "aan_pairs_matched": {
            "split": [*4 * ["train"], "eval", *4 * ["test"]],
            "label": [1, 1, 1, 0, 1, 1, 1, 1, 0],
            "id1": 9 * ["A"],
            "id2": [*3 * ["B"], "A", "B", *3 * ["B"], "A"],
        },
    }
    for name, columns in tables.items():
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(listops, "TRAIN_SIZE", 4)
    monkeypatch.setattr(listops, "VALIDATION_SIZE", 2)


def test_brackets_in_a_path_are_no_markup(small, tmp_path):
    arguments = ["--workers", "1", "--test-size", "3", "--data", str(tmp_path / "copy [old]")]
    prepared = CliRunner().invoke(app, ["data", "prepare", "listops", *arguments])
    assert f"written: {tmp_path / 'copy [old]' / 'listops'}\n" in prepared.output
    listed = CliRunner().invoke(app, ["data", "list", "--data", str(tmp_path / "copy [old]")])
    assert "copy [old]" in " ".join(listed.output.split())


@pytest.mark.parametrize("command", ["prepare", "list"])
def test_help_shows_an_example(command):
    result = CliRunner().invoke(app, ["data", command, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert f"Example: schoenbat data {command}" in result.output
    assert "--data" in result.output


def test_a_generated_task(invoke, small, tmp_path):
    result = invoke("prepare", "listops", "--workers", 1, "--test-size", 3)
    assert result.exit_code == 0, result.output
    task = data.load("listops", tmp_path / "root")
    assert (
        f"listops: 4 + 2 + 3 examples of up to 2,048 tokens, fingerprint {task.fingerprint[:16]}"
        in result.output
    )
    assert "generating" in result.output
    assert "9/9" in result.output


def test_retrieval_shows_what_needs_no_reading(invoke, papers):
    result = invoke("prepare", "retrieval", "--from", papers)
    assert result.exit_code == 0, result.output
    assert "75.0% on test by the more frequent answer, 100.0% by how often" in result.output


def test_the_list_shows_what_is_there_in_80_columns(invoke, papers, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "width", 80)
    invoke("prepare", "retrieval", "--from", papers, "--pairs", "matched")
    fingerprint = data.load("retrieval", tmp_path / "root").fingerprint[:16]
    lines = {words[0]: words[1:] for line in invoke("list").output.splitlines() if (words := line.split())}
    assert set(data.task_names()) <= set(lines)
    assert lines["retrieval"] == ["4", "1", "4", "4,096", "pairs=matched", fingerprint]
    assert lines["text"] == ["not", "prepared"]


def test_the_longest_line_of_the_list_fits_80_columns(invoke, monkeypatch):
    cells = ["96,000", "20,000", "20,000", "2,048", "test_size=20000", 16 * "f"]
    monkeypatch.setattr("schoenbat.cli.data._cells", lambda name, root: cells)
    monkeypatch.setattr(console, "width", 80)
    assert [line.split() for line in invoke("list").output.splitlines()].count(["pathfinder", *cells]) == 1


def test_the_list_shows_damage(invoke, papers, tmp_path):
    invoke("prepare", "retrieval", "--from", papers)
    (tmp_path / "root" / "retrieval" / "test_labels.npy").unlink()
    result = invoke("list")
    assert result.exit_code == 0
    assert "damaged" in result.output
    assert "test_labels.npy is missing" in result.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["words"], "no task 'words'"),
        (["text", "--from", "nowhere"], "there is no nowhere"),
        (["text", "--from", "nowhere", "--pairs", "uniform"], "text has no pairs"),
        (["retrieval"], "retrieval has no public address"),
        (["image", "--from", "http://127.0.0.1:1/cifar-10-python.tar.gz"], "could not be read"),
        (["listops", "--test-size", "0"], "--test-size"),
    ],
)
def test_errors_are_shown_without_a_traceback(invoke, tmp_path, arguments, problem):
    result = invoke("prepare", *arguments)
    assert result.exit_code == 2
    assert problem in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("root/[!d]*"))


def test_an_interruption_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-c", "from schoenbat.cli import main; main()", "data", "prepare", "listops"]
    with subprocess.Popen(
        [*command, "--workers", "2", "--data", str(tmp_path / "root")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        while not (tmp_path / "root").exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)
        # Ctrl-C reaches the workers too.
        os.killpg(process.pid, signal.SIGINT)
        # Comes back when nobody holds the other end any more, workers included.
        said = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert "stopped: nothing of the task was written; an interrupted download goes on" in said
    assert not list((tmp_path / "root").iterdir())


def test_the_command_line_does_not_load_pyarrow():
    program = "import sys, schoenbat.cli; print({'pyarrow', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
