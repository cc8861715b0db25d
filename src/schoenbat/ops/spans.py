"""Which rows are worked on at once: so many that what is formed of them stays in the cache."""

import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor


def spans(x: Tensor, factors: int = 0) -> Iterator[slice]:
    """Cut the rows of x ``(..., n, d)`` so that a chunk stays in the cache.

    Of each row so many `factors` are formed. A graph for ONNX has one chunk, whatever the length will be.
    """
    if torch.onnx.is_in_onnx_export():
        return iter([slice(None)])
    length = max(64, rows_at_once(x, factors) // 64 * 64)
    return (slice(start, start + length) for start in range(0, max(x.shape[-2], 1), length))


def rows_at_once(x: Tensor, factors: int = 0) -> int:
    """Of each sequence and head of x ``(..., n, d)``, so that all of them together fit."""
    sequences, width = math.prod(x.shape[:-2]), x.shape[-1]
    if x.device.type != "cpu":  # where more chunks are more launches, and no cache holds one
        return 2**25 // max(1, sequences * width)
    _keep_freed_memory()
    # Half of the factors: with all of them, and with none, maps of some 500 took longer.
    return 2**19 // max(1, sequences * max(width, factors // 2))


def in_chunks(function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> Tensor:
    """``function(x, *more)``, which works on each row for itself, in the dtype of x."""
    cut = list(spans(x))
    if len(cut) == 1:
        return function(x, *more).to(x.dtype)
    out = torch.empty_like(x)
    for span in cut:
        out[..., span, :] = function(*(rows[..., span, :] for rows in (x, *more)))
    return out


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep what a chunk frees for the next one.

    glibc hands free memory above a threshold back to the system, and all of its pages are faulted in again: a
    tenth of the time. The threshold follows the largest block freed so far, up to 32 MiB; this one is never
    touched.
    """
    torch.empty(2**25 - 2**20, dtype=torch.uint8)
