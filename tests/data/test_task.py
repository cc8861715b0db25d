"""Splits: tokens, lengths and masks over a shared store."""

import numpy as np
import pytest

from schoenbat.data import Split
from schoenbat.data.arrays import NAMES, consecutive, fingerprint

STORE = np.array([[3, 0, 2, 0], [4, 0, 0, 0], [0, 5, 5, 5]], dtype=np.uint8)
LENGTHS = np.array([3, 1, 4])


@pytest.mark.parametrize(
    ("hide_zeros", "expected"),
    [
        (True, [[1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 1, 1]]),
        (False, [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]),
    ],
)
def test_masks_under_both_rules(hide_zeros, expected):
    split = Split(STORE, LENGTHS, np.arange(3), np.zeros(3, int), hide_zeros)
    assert split.mask(slice(None)).astype(int).tolist() == expected
    assert split.mask(2).astype(int).tolist() == expected[2]
    assert split.mask(np.array([2, 0])).astype(int).tolist() == [expected[2], expected[0]]
    assert split.mask(0).dtype == bool


def test_pairs_share_the_store():
    split = Split(STORE, LENGTHS, np.array([[0, 2], [2, 1]]), np.array([1, 0]), hide_zeros=False)
    assert split.tokens.tolist() == [
        [STORE[0].tolist(), STORE[2].tolist()],
        [STORE[2].tolist(), STORE[1].tolist()],
    ]
    assert split.lengths.tolist() == [[3, 4], [4, 1]]
    assert split.mask(slice(0, 1)).sum(axis=-1).tolist() == [[3, 4]]
    assert len(split) == 2


def test_consecutive_splits_cover_the_store_in_order():
    arrays = consecutive(STORE, LENGTHS, np.array([7, 8, 9]), {"train": 1, "validation": 1, "test": 1})
    assert tuple(arrays) == NAMES
    assert [arrays[f"{split}_labels"].tolist() for split in ("train", "validation", "test")] == [
        [7],
        [8],
        [9],
    ]
    assert arrays["test_members"].tolist() == [2]


def test_the_fingerprint_sees_values_names_types_and_shapes():
    array = np.arange(6)
    different = [
        {"a": array},
        {"b": array},
        {"a": array.reshape(2, 3)},
        {"a": array.astype(np.int32)},
        {"a": array + 1},
        {"a": array, "b": array},
    ]
    assert len({fingerprint(arrays) for arrays in different}) == len(different)
    assert fingerprint({"a": array, "b": STORE}) == fingerprint({"b": STORE, "a": array})
    # Values in memory are what counts, not how they lie there.
    assert fingerprint({"a": STORE.T}) == fingerprint({"a": STORE.T.copy()})
