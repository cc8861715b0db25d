"""Texts as tokens: each byte of the UTF-8 encoding is a token, 0 is padding."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def encode(texts: Sequence[bytes], max_length: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Tokens ``(N, max_length)`` and lengths ``(N,)``; a NUL, which would read as padding, becomes a space.

    >>> tokens, lengths = encode([b"a\\0b", "naïf".encode()], max_length=3)
    >>> tokens.tolist(), lengths.tolist()
    ([[97, 32, 98], [110, 97, 0]], [3, 2])
    """
    tokens = np.zeros((len(texts), max_length), dtype=np.uint8)
    lengths = np.zeros(len(texts), dtype=np.int64)
    for row, text in enumerate(texts):
        short = cut(text, max_length).replace(b"\0", b" ")
        tokens[row, : len(short)] = np.frombuffer(short, dtype=np.uint8)
        lengths[row] = len(short)
    return tokens, lengths


def cut(text: bytes, limit: int) -> bytes:
    """The first ``limit`` bytes at most, without the beginning of a character that does not fit.

    >>> cut("naïf".encode(), 3), cut("naïf".encode(), 4).decode()
    (b'na', 'naï')
    """
    if len(text) <= limit:
        return text
    # A character has at most three bytes after its first; more of that kind are no UTF-8, and are just cut.
    starts = (end for end in range(limit, max(limit - 4, 0), -1) if text[end] & 0xC0 != 0x80)
    return text[: next(starts, limit)]
