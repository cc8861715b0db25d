"""The training loop: it learns, its schedule, its determinism, what it reports."""

import pytest
import torch
from torch import nn

from schoenbat.training import Examples, TrainingOptions, accuracy, train
from schoenbat.training.loop import _batches


def first_token_task(count, seed):
    """The label is the first token, so a linear model on one-hot tokens solves it."""
    tokens = torch.randint(0, 5, (count, 4), generator=torch.Generator().manual_seed(seed))
    return Examples(tokens, tokens[:, 0])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 5))


def run(**options):
    net = model()
    steps = []
    result = train(
        net,
        first_token_task(200, 0),
        first_token_task(100, 1),
        TrainingOptions(**{"steps": 60, "learning_rate": 0.05, "evaluate_every": 25} | options),
        steps.append,
    )
    return net, result, steps


def test_it_learns_and_reports():
    net, result, steps = run()
    assert steps == list(range(1, 61))
    assert [progress.step for progress in result.history] == [25, 50, 60]
    assert result.history[-1].loss < 0.5 * result.history[0].loss
    assert result.accuracy > 0.95
    assert result.accuracy == accuracy(net, first_token_task(100, 1))
    assert result.seconds > 0
    assert net.training


def test_the_same_seed_gives_the_same_run():
    assert run()[1].history == run()[1].history
    assert run()[1].history != run(seed=1)[1].history


def test_learning_rate_rises_then_falls_to_zero():
    options = TrainingOptions(steps=100, warmup=20)
    factors = [options.learning_rate_factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 20)
    assert factors[19] == factors[20] == max(factors) == 1.0
    assert factors[60] == pytest.approx(0.5)
    assert factors[100] == 0.0


def test_gradients_are_clipped():
    """With a bound of zero no gradient is left, and without weight decay nothing moves."""
    net, _, _ = run(max_gradient_norm=0.0, weight_decay=0.0, steps=3)
    for after, before in zip(net.parameters(), model().parameters(), strict=True):
        torch.testing.assert_close(after, before)


def test_every_pass_visits_every_example_once():
    batches = _batches(10, TrainingOptions(steps=6, batch_size=5))
    assert len(batches) == 6
    passes = [torch.cat(batches[i : i + 2]) for i in (0, 2, 4)]
    assert all(sorted(one.tolist()) == list(range(10)) for one in passes)
    assert not torch.equal(passes[0], passes[1])


def test_accuracy_counts_all_examples_and_leaves_the_mode():
    class FirstToken(nn.Module):
        def forward(self, tokens):
            assert not self.training
            return nn.functional.one_hot(tokens[:, 0], 5)

    net = FirstToken()
    examples = first_token_task(10, 0)
    half_wrong = Examples(
        examples.tokens, torch.where(torch.arange(10) < 5, examples.labels, 4 - examples.labels)
    )
    expected = (examples.labels == half_wrong.labels).float().mean().item()
    assert accuracy(net, examples, batch_size=3) == 1.0
    assert accuracy(net, half_wrong, batch_size=3) == pytest.approx(expected)
    assert net.training


def test_majority_share():
    assert Examples(torch.zeros(5, 1), torch.tensor([2, 0, 2, 1, 2])).majority_share() == 0.6
