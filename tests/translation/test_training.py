"""What training reports is so; and it learns a few sentences by heart."""

import math
from dataclasses import replace

import pytest
import torch

from schoenbat.translation import training
from schoenbat.translation.options import ATTENTIONS, TranslationOptions
from schoenbat.translation.training import build, check_attention, encode, evaluate, losses, score, train


@pytest.fixture(scope="module")
def options():
    return TranslationOptions(
        epochs=2,
        vocab_size=300,
        dim=32,
        num_heads=2,
        hidden_dim=64,
        num_layers=1,
        batch_tokens=512,
        dropout=0.0,
        learning_rate=3e-3,
        beam_size=2,
    )


@pytest.fixture(scope="module")
def encoded(corpus, options):
    return encode(corpus, options)


def silent(doing, step):
    pass


def test_losses_are_those_of_torch_over_real_tokens(encoded, options):
    model = build("softmax", len(encoded.subwords), options).eval()
    batch = next(encoded.train.batches(512))
    loss, smoothed, tokens = losses(model, batch, options)
    logits = model(batch.source, batch.target[:, :-1]).flatten(0, 1)
    following = batch.target[:, 1:].flatten()
    for found, smoothing in ((loss, 0.0), (smoothed, 0.1)):
        expected = torch.nn.functional.cross_entropy(
            logits, following, ignore_index=0, label_smoothing=smoothing, reduction="sum"
        )
        torch.testing.assert_close(found, expected)
    assert tokens == (following != 0).sum()


def test_the_loss_of_a_split_does_not_depend_on_its_batches(encoded, options):
    model = build("schoenbat", len(encoded.subwords), options)
    few, many = (
        evaluate(model, encoded.test, replace(options, batch_tokens=tokens)) for tokens in (64, 4096)
    )
    assert few == pytest.approx(many, rel=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_rows_tell_of_every_epoch_and_one_is_tested(encoded, options, attention):
    doing = []
    rows = train(attention, encoded, options, lambda name, step: doing.append(name))
    assert [row.epoch for row in rows] == [1, 2]
    assert {row.attention for row in rows} == {attention}
    assert rows[1].train_loss < rows[0].train_loss < math.log(300) + 1
    for row in rows:
        assert row.perplexity == pytest.approx(math.exp(row.validation_loss))
        assert row.seconds > 0
    (tested,) = (row for row in rows if row.test_bleu_greedy is not None)
    assert tested.validation_loss == min(row.validation_loss for row in rows)
    assert tested.test_bleu_beam is not None
    assert doing[-1] == "testing"


def test_the_epoch_of_the_lowest_validation_loss_is_the_one_that_is_tested(encoded, options, monkeypatch):
    sequence = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(training, "evaluate", lambda model, pairs, options: next(sequence))
    states, scores = [], []

    def watched(model, encoded, options, split, *, beam=False):
        states.append(model.tokens.weight.detach().clone())
        scores.append((split, beam))
        return 10.0 * len(scores)

    monkeypatch.setattr(training, "score", watched)
    rows = train("softmax", encoded, replace(options, epochs=3), silent)
    assert scores == [("validation", False)] * 3 + [("test", False), ("test", True)]
    assert [row.test_bleu_greedy for row in rows] == [None, 40.0, None]
    assert [row.test_bleu_beam for row in rows] == [None, 50.0, None]
    assert torch.equal(states[3], states[1])
    assert not torch.equal(states[3], states[2])


def test_the_same_seed_gives_the_same_rows(encoded, options):
    dropping = replace(options, dropout=0.2, epochs=1)

    def figures(options):
        return [
            (row.train_loss, row.validation_loss, row.test_bleu_beam)
            for row in train("schoenbat", encoded, options, silent)
        ]

    first = figures(dropping)
    assert figures(dropping) == first
    assert figures(replace(dropping, seed=1)) != first


def test_a_huge_loss_has_a_perplexity_that_is_a_number(encoded, options, monkeypatch):
    monkeypatch.setattr(training, "evaluate", lambda model, pairs, options: 1000.0)
    (row,) = train("softmax", encoded, replace(options, epochs=1), silent)
    assert math.isfinite(row.perplexity)


def test_a_loss_that_is_not_finite_ends_the_training(encoded, options):
    with pytest.raises(FloatingPointError, match=r"loss of softmax is .* in epoch 1; try a smaller --learn"):
        train("softmax", encoded, replace(options, learning_rate=1e30, clip_norm=1e30), silent)


@pytest.mark.parametrize(
    ("attention", "problem"),
    [
        ("nystromformer", "no causal form"),
        ("none", "needs as many queries as keys"),
        ("schoenbat:normalization=batch", "leaks the future"),
        ("softmax:colour=red", "colour"),
        ("softmax:causal=true", "depends on padding or on later tokens"),
        ("cosformer", "depends on padding or on later tokens"),
    ],
)
def test_an_attention_that_cannot_translate_is_refused_before_training(options, attention, problem):
    with pytest.raises(ValueError, match=problem):
        check_attention(attention, options)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attentions_of_the_experiment_can_translate(options, attention):
    check_attention(attention, options)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_sentences_are_learnt_by_heart(encoded, options, attention):
    longer = replace(options, epochs=60, dim=64, hidden_dim=128, label_smoothing=0.0)
    rows = train(attention, encoded, longer, silent)
    (tested,) = (row for row in rows if row.test_bleu_greedy is not None)
    assert tested.test_bleu_greedy > 90
    assert tested.test_bleu_beam > 90
    assert tested.perplexity < 1.2


def test_an_untrained_model_translates_nothing(encoded, options):
    model = build("softmax", len(encoded.subwords), options)
    assert score(model, encoded, options, "test") < 10


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_gpu_computes_the_same_and_learns(corpus, encoded, options, attention):
    there = replace(options, device="cuda")
    moved = encode(corpus, there)
    here, found = (
        evaluate(build(attention, len(each.subwords), chosen), each.validation, chosen)
        for each, chosen in ((encoded, options), (moved, there))
    )
    assert found == pytest.approx(here, rel=0.02)
    rows = train(attention, moved, there, silent)
    assert rows[1].train_loss < rows[0].train_loss
