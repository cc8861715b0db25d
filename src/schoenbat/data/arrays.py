"""The arrays that a task is kept as: a store of sequences, and for each split its members and labels."""

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "validation", "test")
NAMES = (
    "sequences",
    "sequence_lengths",
    *(f"{split}_{part}" for split in SPLITS for part in ("members", "labels")),
)

Arrays = Mapping[str, NDArray]


def consecutive(
    sequences: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    labels: NDArray[np.int64],
    sizes: Mapping[str, int],
) -> Arrays:
    """The arrays of splits that lie one after the other in the store.

    >>> sizes = {"train": 2, "validation": 1, "test": 1}
    >>> arrays = consecutive(np.zeros((4, 2), np.uint8), np.ones(4, int), np.arange(4), sizes)
    >>> arrays["train_members"].tolist(), arrays["test_labels"].tolist()
    ([0, 1], [3])
    """
    ends = np.cumsum([sizes[split] for split in SPLITS])
    members = dict(zip(SPLITS, np.split(np.arange(len(labels)), ends[:-1]), strict=True))
    return selected(sequences, lengths, members, {split: labels[members[split]] for split in SPLITS})


def selected(
    sequences: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    members: Mapping[str, NDArray[np.int64]],
    labels: Mapping[str, NDArray[np.int64]],
) -> Arrays:
    """The arrays of splits over any members of the store."""
    arrays: dict[str, NDArray] = {"sequences": sequences, "sequence_lengths": lengths}
    for split in SPLITS:
        arrays |= {f"{split}_members": members[split], f"{split}_labels": labels[split]}
    return arrays


def fingerprint(arrays: Arrays) -> str:
    """The SHA-256 of the names, types, shapes and values of some arrays, whatever their order.

    >>> fingerprint({"a": np.arange(3)}) == fingerprint({"a": np.arange(3)[None]})
    False
    """
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
