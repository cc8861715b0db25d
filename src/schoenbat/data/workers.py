"""What is generated block by block, by one process or by several: always in the same order."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

Block = TypeVar("Block")
# Blocks that are drawn ahead for each process: enough that none waits for the reader.
_AHEAD = 4


def blocks_in_order(
    draw: Callable[[int], Block], numbers: Iterable[int], workers: int
) -> Generator[Block, None, None]:
    """``draw(number)`` for each of the ``numbers``, which may be without end: close it where that is enough.

    >>> import itertools
    >>> blocks = blocks_in_order(abs, itertools.count(-2), workers=1)
    >>> next(blocks), next(blocks)
    (2, 1)
    """
    if workers == 1:
        yield from map(draw, numbers)
        return
    # Not multiprocessing.Pool: ended while its processes hand over what nobody wants any more, it may wait
    # for itself for ever. Ctrl-C reaches every process; it is this one that ends the others.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    )
    waiting: deque[Future[Block]] = deque()
    try:
        for number in numbers:
            waiting.append(pool.submit(draw, number))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
