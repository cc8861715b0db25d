"""A later call takes over what belongs to it, and nothing else."""

from dataclasses import replace

import pytest

from schoenbat.report.results import write_results
from schoenbat.training.checkpoint import CheckpointError
from schoenbat.translation.options import TranslationOptions
from schoenbat.translation.record import EXPERIMENT, EpochRow, attentions_of, read_rows


@pytest.fixture
def options():
    return TranslationOptions(data={"corpus.parquet": "12ab"})


@pytest.fixture
def rows():
    row = EpochRow("softmax", 0, 1, 4.0, 3.0, 20.1, 12.5, 1.5, 1000)
    return [row, replace(row, epoch=2, test_bleu_greedy=30.0, test_bleu_beam=31.0)]


@pytest.fixture
def path(tmp_path, options, rows):
    path = tmp_path / "translate.json"
    write_results(path, EXPERIMENT, options, rows)
    return path


def test_rows_come_back(path, options, rows, tmp_path):
    assert read_rows(path, options) == rows
    assert read_rows(tmp_path / "nothing.json", options) == []
    assert attentions_of(rows) == ("softmax",)


def test_other_attentions_are_no_other_options(path, options, rows):
    assert read_rows(path, replace(options, attentions=("mean",))) == rows


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"epochs": 3}, "epochs: 20 there, 3 here"),
        ({"data": {"corpus.parquet": "34cd"}}, "12ab"),
    ],
)
def test_other_options_are_refused(path, options, change, named):
    with pytest.raises(CheckpointError, match=named):
        read_rows(path, replace(options, **change))


@pytest.mark.parametrize("content", ["", "[]", '{"experiment": "speed", "rows": [], "options": {}}'])
def test_a_file_of_something_else_is_refused(path, options, content):
    path.write_text(content)
    with pytest.raises(ValueError, match=r"translate\.json is no result to go on with"):
        read_rows(path, options)
