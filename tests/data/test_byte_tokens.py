"""Bytes as tokens: the cut, padding and NUL."""

import pytest

from schoenbat.data.byte_tokens import cut, encode


@pytest.mark.parametrize("words", ["aüb", "ab€cd", "a😀b", "plain"])
def test_every_cut_is_text_and_as_long_as_it_can_be(words):
    whole = words.encode()
    for limit in range(1, len(whole) + 2):
        short = cut(whole, limit)
        assert words.startswith(short.decode())
        longer = words[: len(short.decode()) + 1].encode()
        assert len(short) <= limit
        assert short == whole or len(longer) > limit


def test_what_is_no_utf8_is_cut_at_the_limit():
    assert cut(20 * b"\x80", 10) == 10 * b"\x80"


def test_padding_is_the_only_zero():
    tokens, lengths = encode([b"\0\0", b"", b"xyz"], 3)
    assert tokens.tolist() == [[32, 32, 0], [0, 0, 0], [120, 121, 122]]
    assert lengths.tolist() == [2, 0, 3]
