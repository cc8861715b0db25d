"""Greedy search follows the largest logit; beam search finds what looking at everything finds."""

import itertools

import pytest
import torch

from schoenbat.translation.batches import Pairs
from schoenbat.translation.decoding import beam_search, beams, greedy, translate
from schoenbat.translation.model import Translator
from schoenbat.translation.tokenizer import BEGIN, END, PAD, Subwords

VOCABULARY = 6
WORDS = (3, 4, 5)
SIZES = {"dim": 16, "num_heads": 2, "hidden_dim": 32, "num_layers": 1, "dropout": 0.1}


@pytest.fixture(params=[("softmax", 1), ("schoenbat", 2)], ids=["softmax", "schoenbat"])
def model(request):
    """Drawn from seeds whose best translations differ in length."""
    attention, seed = request.param
    torch.manual_seed(seed)
    model = Translator(attention, vocab_size=VOCABULARY, max_length=12, **SIZES)
    with torch.no_grad():
        # Far from uniform, of the source and of the prefix, and ending now and then.
        model.tokens.weight.mul_(1.5)
        model.decoder[0].cross.output.weight.mul_(4.0)
        model.decoder_norm.bias.copy_(0.5 * model.tokens.weight[END])
    return model.eval()


@pytest.fixture
def source():
    tokens = torch.randint(3, VOCABULARY, (6, 7))
    tokens[1, 3:] = PAD
    return tokens


def log_probabilities(model, source, translations):
    """Of each translation of one source, by one pass over all of it, among the tokens that may occur."""
    width = max(map(len, translations))
    rows = torch.tensor([[*words, *(width - len(words)) * [PAD]] for words in translations])
    prefixes = torch.cat([torch.full((len(rows), 1), BEGIN), rows[:, :-1]], -1)
    logits = model(source.expand(len(rows), -1), prefixes).detach()
    logits[..., [PAD, BEGIN]] = -torch.inf
    found = logits.log_softmax(-1).gather(-1, rows[..., None]).squeeze(-1)
    return found.masked_fill(rows == PAD, 0.0).sum(-1).tolist()


def every_translation(longest):
    for length in range(1, longest + 1):
        for words in itertools.product(WORDS, repeat=length - 1):
            yield (*words, END)
    yield from itertools.product(WORDS, repeat=longest)


def without_padding(row):
    return tuple(token for token in row.tolist() if token != PAD)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
def test_a_wide_beam_finds_the_best_of_all_translations(model, source, length_penalty):
    longest = 4
    found = beam_search(model, source, longest, beam_size=130, length_penalty=length_penalty)
    lengths = set()
    for sentence, row in zip(source, found, strict=True):
        translations = list(every_translation(longest))
        totals = log_probabilities(model, sentence, translations)
        scores = {
            words: total / len(words) ** length_penalty
            for words, total in zip(translations, totals, strict=True)
        }
        best = max(scores.values())
        assert scores[without_padding(row)] == pytest.approx(best, abs=1e-5)
        lengths.add(len(without_padding(row)))
    if length_penalty == 0.0:
        assert len(lengths) > 1


def test_a_beam_of_one_is_greedy(model, source):
    chosen = greedy(model, source, 10)
    one = beam_search(model, source, 10, beam_size=1, length_penalty=0.7)
    assert [without_padding(row) for row in one] == [without_padding(row) for row in chosen]


def test_greedy_takes_the_largest_logit_of_each_prefix(model, source):
    for sentence, row in zip(source, greedy(model, source, 10), strict=True):
        prefix = [BEGIN]
        for token in without_padding(row):
            assert prefix[-1] != END
            logits = model(sentence[None], torch.tensor([prefix]))[0, -1]
            assert token == 2 + logits[2:].argmax().item()
            prefix.append(token)
        assert prefix[-1] == END or len(prefix) == 11


def test_a_wider_beam_is_no_worse_than_greedy(model, source):
    narrow, wide = (beam_search(model, source, 6, beam_size=size, length_penalty=0.0) for size in (1, 40))
    for sentence, *rows in zip(source, narrow, wide, strict=True):
        few, many = log_probabilities(model, sentence, [without_padding(row) for row in rows])
        assert many >= few - 1e-5


def test_neighbours_and_padding_change_no_translation(model, source):
    together = beam_search(model, source, 8, beam_size=3)
    padded = beam_search(model, torch.nn.functional.pad(source, (0, 3)), 8, beam_size=3)
    alone = [beam_search(model, sentence[sentence != PAD][None], 8, beam_size=3)[0] for sentence in source]
    for rows in zip(together, padded, alone, strict=True):
        assert len({without_padding(row) for row in rows}) == 1


def test_translations_come_back_in_the_order_of_their_sources(sentences):
    subwords = Subwords(sentences, 300)
    encoded = subwords.encode(sentences.german)
    model = Translator("softmax", vocab_size=len(subwords), max_length=64, **SIZES)
    model.eval()
    options = {"search": beams(2, 1.0)}
    all_at_once, few = (
        translate(model, subwords, Pairs(encoded, encoded, 64), 3, count=count, **options)
        for count in (50, 7)
    )
    assert all_at_once == few
    for row in (0, 17, 47):
        one = Pairs(encoded[row : row + 1], encoded[row : row + 1], 64)
        assert translate(model, subwords, one, 3, **options) == [all_at_once[row]]
