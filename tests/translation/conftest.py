"""A corpus of a few sentences that can be learnt by heart."""

import itertools

import pytest

from schoenbat.data.multi30k import Multi30k, Sentences

WORDS = {
    "who": [("Ein Hund", "A dog"), ("Die Frau", "The woman"), ("Zwei Kinder", "Two children"), ("Er", "He")],
    "does": [("läuft", "is running"), ("schläft", "is asleep"), ("spielt", "plays"), ("wartet", "waits")],
    "where": [("am Strand", "on the beach"), ("im Park", "in the park"), ("im Schnee", "in the snow")],
}


@pytest.fixture(scope="session")
def sentences():
    rows = list(itertools.product(*WORDS.values()))
    return Sentences(*([" ".join(part[i] for part in row) + "." for row in rows] for i in (0, 1)))


@pytest.fixture(scope="session")
def corpus(sentences):
    """Validation and test are of the training sentences: memory is what is asked for."""
    return Multi30k(sentences, sentences.first(6), sentences.first(8), {"made-up.parquet": "0" * 64})
