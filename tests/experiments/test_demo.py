"""The demo's training run, small."""

import torch

from schoenbat.data import listops
from schoenbat.experiments.demo import DemoOptions, listops_task, train_one

SMALL = DemoOptions(
    ("softmax", "schoenbat:num_features=32"),
    num_training=600,
    num_validation=200,
    min_length=8,
    max_length=32,
    steps=50,
)


def test_the_split_is_disjoint_and_labelled():
    task = listops_task(SMALL)
    training, validation = task.train, task.validation
    assert (len(training), len(validation)) == (600, 200)
    expressions = [
        {
            listops.decode(row): label
            for row, label in zip(part.tokens.tolist(), part.labels.tolist(), strict=True)
        }
        for part in (training, validation)
    ]
    assert not expressions[0].keys() & expressions[1].keys()
    assert all(listops.evaluate(text) == label for part in expressions for text, label in part.items())
    assert training.tokens.shape[1] == 32
    assert training.lengths.min() > 8


def test_both_attentions_get_clearly_above_the_most_frequent_label():
    task = listops_task(SMALL)
    for attention in SMALL.attentions:
        steps = []
        row = train_one(attention, task, SMALL, steps.append)
        assert steps == list(range(1, 51))
        assert row.accuracy == row.history[-1].accuracy
        assert row.accuracy > row.majority + 0.08


def test_attentions_start_alike_and_runs_repeat():
    options = DemoOptions(num_training=64, num_validation=32, steps=4)
    task = listops_task(options)
    torch.manual_seed(1)
    first = train_one("softmax", task, options)
    again = train_one("softmax", task, options)
    assert first.history == again.history
    assert train_one("mean", task, options).parameters == first.parameters
