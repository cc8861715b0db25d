"""Nothing that takes no part is seen: neither padding nor the future, whatever the attention."""

import itertools

import pytest
import torch

from schoenbat.translation.model import Translator, sinusoids
from schoenbat.translation.options import ATTENTIONS

SEVERAL = [
    *ATTENTIONS,
    "softmax:naive=true",
    "schoenbat:construction=exact-low,kernel=inv",
    "mean",
    "performer",
]
SIZES = {
    "vocab_size": 30,
    "max_length": 24,
    "dim": 32,
    "num_heads": 2,
    "hidden_dim": 48,
    "num_layers": 2,
    "dropout": 0.1,
}


@pytest.fixture(params=SEVERAL)
def model(request):
    return Translator(request.param, **SIZES).double().eval()


@pytest.fixture
def source():
    return torch.randint(3, 30, (3, 11))


@pytest.fixture
def target():
    return torch.randint(3, 30, (3, 9))


def pad(tokens, count):
    return torch.nn.functional.pad(tokens, (0, count))


def test_padding_changes_nothing(model, source, target):
    logits = model(source, target)
    assert logits.shape == (3, 9, 30)
    torch.testing.assert_close(model(pad(source, 13), pad(target, 7))[:, :9], logits, rtol=1e-9, atol=1e-9)


def test_padding_changes_nothing_where_sentences_differ_in_length(model, source, target):
    rows = [model(source[:1, :4], target[:1, :3]), model(source[1:2], target[1:2])]
    source[0, 4:], target[0, 3:] = 0, 0
    logits = model(source[:2], target[:2])
    torch.testing.assert_close(logits[:1, :3], rows[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits[1:], rows[1], rtol=1e-9, atol=1e-9)


def test_padding_changes_no_gradient(model, source, target):
    gradients = []
    for count in (0, 5):
        model.zero_grad()
        model(pad(source, count), pad(target, count))[:, :9].square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-7, atol=1e-7, msg=name)


def test_a_later_token_changes_no_earlier_logit_but_its_own(model, source, target):
    before = model(source, target)
    for position in range(1, 9):
        other = target.clone()
        other[:, position] = 3 + (target[:, position] - 3 + 5) % 27
        after = model(source, other)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=1e-9, atol=1e-9)
        assert (after[:, position] - before[:, position]).abs().max() > 1e-6


def test_every_source_token_counts(model, source, target):
    before = model(source, target)
    for position in range(source.shape[1]):
        other = source.clone()
        other[:, position] = 3 + (source[:, position] - 3 + 5) % 27
        assert (model(other, target) - before).abs().max() > 1e-9


def test_no_two_layers_have_the_same_map():
    model = Translator("schoenbat", **SIZES | {"num_layers": 1})
    maps = [model.encoder[0].attention, model.decoder[0].attention, model.decoder[0].cross]
    x = torch.randn(4, 16)
    first, *others = (part.attention.features(x) for part in maps)
    assert not any(torch.allclose(first, other) for other in others)


def test_embeddings_and_output_are_one_matrix():
    model = Translator("softmax", **SIZES)
    assert sum(30 in parameter.shape for parameter in model.parameters()) == 1


def test_positions_are_told_apart_by_sines():
    rows = sinusoids(50, 16)
    assert rows.shape == (50, 16)
    assert torch.cdist(rows, rows).add(torch.eye(50)).min() > 0.1
    torch.testing.assert_close(rows[7, 0], torch.tensor(7.0).sin())
    torch.testing.assert_close(rows[7, 9], torch.tensor(7.0 * 10_000 ** (-2 / 16)).cos())


def test_a_sentence_that_is_too_long_is_refused():
    model = Translator("softmax", **SIZES | {"max_length": 8})
    with pytest.raises(ValueError, match="9 tokens, but max_length is 8"):
        model(torch.ones(1, 9, dtype=torch.long), torch.ones(1, 3, dtype=torch.long))


def test_no_two_attentions_draw_the_same():
    model = Translator("performer", **SIZES | {"num_layers": 1})
    drawn = [buffer for name, buffer in model.named_buffers() if name.endswith("directions")]
    assert len(drawn) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
