"""Every text comes back from its subwords, and the vocabulary depends on its sentences alone."""

import pytest

from schoenbat.data.multi30k import Sentences
from schoenbat.translation.tokenizer import BEGIN, END, PAD, Subwords


@pytest.fixture(scope="module")
def subwords(sentences):
    return Subwords(sentences, 400)


@pytest.mark.parametrize("text", ["Ein Hund läuft.", "Was niemand je sah: 3½ Œuvres, 犬!", "a", ""])
def test_every_text_comes_back(subwords, text):
    (row,) = subwords.encode([text])
    assert not {PAD, BEGIN, END} & set(row)
    assert subwords.decode([row, [*row, END, 77, 78], [*row, END, PAD]]) == [text] * 3


def test_a_word_is_the_same_at_the_beginning_and_inside(subwords):
    alone, inside = subwords.encode(["Hund", "Ein Hund"])
    assert inside[-len(alone) :] == alone


def test_composed_and_decomposed_letters_are_the_same(subwords):
    assert subwords.encode(["läuft"]) == subwords.encode(["la\u0308uft"])


def test_the_same_sentences_give_the_same_vocabulary(sentences, subwords):
    texts = [*sentences.german, *sentences.english]
    assert Subwords(sentences, 400).encode(texts) == subwords.encode(texts)
    assert len(subwords) <= 400
    assert sum(map(len, subwords.encode(texts))) < sum(map(len, texts))


def test_a_vocabulary_needs_all_bytes():
    with pytest.raises(ValueError, match="at least 259 entries, got 100"):
        Subwords(Sentences(["a"], ["b"]), 100)
