"""Blocks by several processes: their order, what an error does, and that they end when nobody wants more."""

import itertools
import operator
import subprocess
import sys
from functools import partial

import pytest

from schoenbat.data.workers import blocks_in_order

STOPPED_EARLY = """
import itertools, operator
from functools import partial
from schoenbat.data.workers import blocks_in_order

for _ in range(2):
    blocks = blocks_in_order(partial(operator.mul, bytes(40_000)), itertools.count(1), workers=12)
    assert [len(next(blocks)) for _ in range(30)] == [40_000 * number for number in range(1, 31)]
    blocks.close()
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_the_order_is_that_of_the_numbers(workers):
    assert list(blocks_in_order(partial(pow, 2), range(20), workers)) == [2**number for number in range(20)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_reaches_the_reader(workers):
    blocks = blocks_in_order(partial(operator.truediv, 6), itertools.count(-1), workers)
    assert next(blocks) == -6
    with pytest.raises(ZeroDivisionError):
        next(blocks)


def test_many_processes_end_where_the_reader_has_enough():
    """In a process of its own: where they wait for one another, nothing else would end."""
    subprocess.run([sys.executable, "-c", STOPPED_EARLY], timeout=100, check=True)
