"""Batches hold every pair once, in few shapes, in an order that the generator decides."""

import pytest
import torch

from schoenbat.translation.batches import Pairs
from schoenbat.translation.tokenizer import BEGIN, END, PAD


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 38, (200, 2), generator=generator).tolist()
    return [[[3 + number % 50] * length for length in pair] for number, pair in enumerate(lengths)]


@pytest.fixture
def pairs(rows):
    return Pairs([row[0] for row in rows], [row[1] for row in rows], max_length=40)


def ways(pairs):
    yield list(pairs.batches(256))
    yield list(pairs.batches(256, torch.Generator().manual_seed(1)))
    yield list(pairs.by_length(30))


def test_every_pair_is_there_once_and_whole(pairs, rows):
    for batches in ways(pairs):
        seen = []
        for batch in batches:
            for number, source, target in zip(
                *(x.tolist() for x in (batch.rows, batch.source, batch.target)), strict=True
            ):
                seen.append(number)
                assert [token for token in source if token != PAD] == [*rows[number][0], END]
                assert [token for token in target if token != PAD] == [BEGIN, *rows[number][1], END]
                assert len(target) == len(source) + 1
        assert sorted(seen) == list(range(200))


def test_batches_keep_to_their_size_and_to_few_widths(pairs):
    batches = list(pairs.batches(256, torch.Generator().manual_seed(1)))
    assert len(batches) == pairs.num_batches(256)
    assert all(batch.source.numel() <= 256 for batch in batches)
    assert {batch.source.shape[1] for batch in batches} <= {8, 16, 24, 32, 40}


def test_the_generator_decides_the_order(pairs):
    first, same, other = (
        [batch.rows.tolist() for batch in pairs.batches(256, torch.Generator().manual_seed(seed))]
        for seed in (1, 1, 2)
    )
    assert first == same
    assert first != other


def test_sources_by_length_grow(pairs):
    widths = [batch.source.shape[1] for batch in pairs.by_length(30)]
    assert widths == sorted(widths)
    assert [len(batch.rows) for batch in pairs.by_length(30)] == [30] * 6 + [20]


def test_a_sentence_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="9 subwords, but max_length is 8"):
        Pairs([[3] * 8], [[3]], max_length=8)
    assert next(Pairs([[3] * 8], [[3]], max_length=9).batches(64)).source.shape == (1, 9)
