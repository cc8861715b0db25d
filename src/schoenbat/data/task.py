"""What every task looks like once it is loaded: three splits of token sequences with labels."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint8] | NDArray[np.int16]


@dataclass(frozen=True)
class Split:
    """Examples over a store of sequences, which several examples and several splits may share.

    Args:
        sequences: ``(M, max_length)``, padded with 0.
        sequence_lengths: ``(M,)``, how much of each is not padding.
        members: which sequences each example consists of, ``(N,)``, or ``(N, 2)`` for pairs.
        labels: ``(N,)``.
        hide_zeros: leave out every token 0 (the paper's rule, which on images hides black pixels), not
            only padding.

    >>> store = np.array([[3, 0, 2, 0], [4, 0, 0, 0]], dtype=np.uint8)
    >>> split = Split(store, np.array([3, 1]), np.array([[0, 1]]), np.array([1]))
    >>> split.tokens.shape, split.lengths.tolist(), len(split)
    ((1, 2, 4), [[3, 1]], 1)
    >>> split.mask(0).astype(int).tolist()
    [[1, 0, 1, 0], [1, 0, 0, 0]]
    """

    sequences: Tokens
    sequence_lengths: NDArray[np.int64]
    members: NDArray[np.int64]
    labels: NDArray[np.int64]
    hide_zeros: bool = True

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def tokens(self) -> Tokens:
        """``(N, max_length)``, or ``(N, 2, max_length)`` for pairs."""
        return self.sequences[self.members]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``(N,)``, or ``(N, 2)`` for pairs."""
        return self.sequence_lengths[self.members]

    def mask(self, index: int | slice | NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which positions of the examples ``index`` take part, True where they do."""
        members = self.members[index]
        if self.hide_zeros:
            return np.asarray(self.sequences[members] != 0)
        positions = np.arange(self.sequences.shape[1])
        return np.asarray(positions < self.sequence_lengths[members][..., None])


@dataclass(frozen=True)
class Task:
    """A task of the Long Range Arena: what its tokens and labels are, and its three splits.

    ``tokens`` are below ``vocab_size``, ``labels`` below ``num_classes``; ``paired`` tasks compare two
    sequences. ``fingerprint`` is the SHA-256 of all arrays: what a result says it was trained on.
    """

    name: str
    vocab_size: int
    num_classes: int
    max_length: int
    paired: bool
    train: Split
    validation: Split
    test: Split
    fingerprint: str
