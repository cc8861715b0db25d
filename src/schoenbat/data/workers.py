"""What is generated block by block, by one process or by several: always in the same order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
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
    # for itself for ever.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with_the_parent)
    waiting: deque[Future[Block]] = deque()
    try:
        for number in numbers:
            waiting.append(pool.submit(draw, number))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        with _undisturbed():
            pool.shutdown(cancel_futures=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C once more, while processes finish their last blocks, would leave them waiting for a reader."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_the_parent() -> None:
    """What a worker begins with. Ctrl-C reaches every process; it is the parent that ends the others.

    A parent that is killed ends nobody: its workers would wait for a reader for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
