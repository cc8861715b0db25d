"""The command `translate`: files, going on, interruption, errors."""

import json
import shutil
from functools import partial

import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from schoenbat.cli import app
from schoenbat.translation import options as translation_options
from schoenbat.translation import training

GERMAN = ["Ein Hund läuft.", "Zwei Katzen schlafen.", "Er spielt im Park."]
ENGLISH = ["A dog runs.", "Two cats are asleep.", "He plays in the park."]
SIZES = {"dim": 16, "num_heads": 2, "hidden_dim": 16, "num_layers": 1, "vocab_size": 280, "epochs": 2}


@pytest.fixture
def data(tmp_path):
    splits = [split for split in ("train", "val", "test") for _ in GERMAN]
    path = tmp_path / "data" / "multi30k_de_en.parquet"
    path.parent.mkdir()
    parquet.write_table(pyarrow.table({"de": GERMAN * 3, "en": ENGLISH * 3, "split": splits}), path)
    return path.parent


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def invoke(data, out, monkeypatch):
    """The smallest experiment, whatever is asked for."""
    chosen = translation_options.TranslationOptions
    monkeypatch.setattr(chosen, "quick", partial(chosen, **SIZES, max_length=48, batch_tokens=256))

    def call(*arguments):
        places = ["--data", str(data), "--out", str(out), "--device", "cpu"]
        # What is given last counts.
        words = ["translate", "--quick", *places, *arguments]
        return CliRunner().invoke(app, words, env={"COLUMNS": "100"})

    return call


def read(out):
    return json.loads((out / "translate.json").read_text())


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["translate", "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert "Example: schoenbat translate" in result.output
    assert "--attentions" in result.output


def test_rows_options_figure_and_table(invoke, out, data):
    attention = "schoenbat:construction=paper,normalization=token,scale=none"
    result = invoke("--attentions", "softmax", "--attentions", attention, "--seed", "3")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines()[:-1])) <= 100
    assert "perplexity" in result.output
    assert {path.name for path in out.iterdir()} == {"translate.json", "translate.svg"}
    results = read(out)
    assert results["experiment"] == "translate"
    assert results["options"]["attentions"] == ["softmax", attention]
    assert results["options"]["vocab_size"] <= 280
    assert [len(value) for value in results["options"]["data"].values()] == [64]
    assert [(row["attention"], row["epoch"], row["seed"]) for row in results["rows"]] == [
        (name, epoch, 3) for name in ("softmax", attention) for epoch in (1, 2)
    ]
    tested = [row for row in results["rows"] if row["test_bleu_beam"] is not None]
    assert [row["attention"] for row in tested] == ["softmax", attention]
    svg = (out / "translate.svg").read_text()
    for name in ("softmax", "validation perplexity", "validation BLEU", "epoch"):
        assert f"<!-- {name} -->" in svg


def test_a_second_call_trains_only_what_is_missing(invoke, out):
    assert invoke("--attentions", "softmax").exit_code == 0
    before = read(out)["rows"]
    result = invoke("--attentions", "mean", "--attentions", "softmax")
    assert result.exit_code == 0, result.output
    assert "softmax: in" in result.output
    results = read(out)
    assert results["rows"][:2] == before
    assert results["options"]["attentions"] == ["softmax", "mean"]
    assert [row["attention"] for row in results["rows"]] == ["softmax", "softmax", "mean", "mean"]
    result = invoke("--attentions", "mean")
    assert result.exit_code == 0
    assert read(out) == results


def test_calls_at_the_same_time_keep_what_the_other_has_trained(invoke, out, monkeypatch):
    train = training.train

    def meanwhile(attention, *arguments):
        if attention == "mean":
            assert invoke("--attentions", "softmax").exit_code == 0
        return train(attention, *arguments)

    monkeypatch.setattr(training, "train", meanwhile)
    assert invoke("--attentions", "mean").exit_code == 0
    assert [row["attention"] for row in read(out)["rows"]] == ["softmax", "softmax", "mean", "mean"]


def test_the_same_attention_trained_twice_at_once_stands_there_once(invoke, out, monkeypatch):
    train, calls = training.train, []

    def meanwhile(attention, *arguments):
        calls.append(attention)
        if len(calls) == 1:
            assert invoke("--attentions", "mean").exit_code == 0
        return train(attention, *arguments)

    monkeypatch.setattr(training, "train", meanwhile)
    assert invoke("--attentions", "mean").exit_code == 0
    assert calls == ["mean", "mean"]
    assert [(row["attention"], row["epoch"]) for row in read(out)["rows"]] == [("mean", 1), ("mean", 2)]


def test_other_options_do_not_mix(invoke, out):
    assert invoke("--attentions", "softmax").exit_code == 0
    before = read(out)
    result = invoke("--attentions", "mean", "--seed", "1")
    assert result.exit_code == 2
    assert "seed: 0 there, 1 here" in " ".join(result.output.replace("│", " ").split())
    assert read(out) == before


def test_an_interruption_keeps_what_was_trained(invoke, out, monkeypatch):
    train = training.train

    def interrupted(attention, *arguments):
        if attention == "mean":
            raise KeyboardInterrupt
        return train(attention, *arguments)

    monkeypatch.setattr(training, "train", interrupted)
    result = invoke("--attentions", "softmax,mean")
    assert result.exit_code == 130
    assert "stopped: attentions trained to their end are kept, this one is not" in result.stderr
    assert "Traceback" not in result.output
    assert {row["attention"] for row in read(out)["rows"]} == {"softmax"}
    monkeypatch.setattr(training, "train", train)
    assert invoke("--attentions", "softmax,mean").exit_code == 0
    assert [row["attention"] for row in read(out)["rows"]] == ["softmax", "softmax", "mean", "mean"]


def test_a_loss_that_is_not_finite_ends_with_3_and_keeps_the_rest(invoke, out, monkeypatch):
    train = training.train

    def failing(attention, *arguments):
        if attention == "mean":
            raise FloatingPointError("the loss of mean is nan")
        return train(attention, *arguments)

    monkeypatch.setattr(training, "train", failing)
    result = invoke("--attentions", "softmax,mean")
    assert result.exit_code == 3
    assert "the loss of mean is nan" in result.output
    assert {row["attention"] for row in read(out)["rows"]} == {"softmax"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--attentions", "foo"], "known are softmax"),
        (["--attentions", "nystromformer"], "no causal form"),
        (["--epochs", "0"], "epochs"),
        (["--device", "toaster"], "toaster"),
        (["--vocab-size", "10"], "at least 259"),
        (["--dropout", "2"], "dropout"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(invoke, out, arguments, problem):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert problem in result.output
    assert "Traceback" not in result.output
    assert not out.exists()


def test_missing_data_are_named(invoke, data):
    shutil.rmtree(data)
    result = invoke("--attentions", "softmax")
    assert result.exit_code == 2
    assert "multi30k_de_en.parquet" in result.output
