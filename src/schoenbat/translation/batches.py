"""Sentence pairs on the device, and batches of similar length that are gathered there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schoenbat.translation.tokenizer import BEGIN, END, PAD

WIDTH_STEP = 8
"""Batches are as wide as a multiple of this, so that few shapes occur."""


@dataclass(frozen=True)
class Batch:
    """Pairs ``rows`` of a split: ``source`` ``(B, n)``; ``target``, with begin and end, ``(B, n + 1)``."""

    source: Tensor
    target: Tensor
    rows: Tensor


class Pairs:
    """A split of encoded sentence pairs; sources get an end, targets a begin and an end.

    Args:
        sources: subwords of each sentence.
        targets: those of its translation.
        max_length: how long a sentence may be, its end included.
        device: where the subwords are kept.

    >>> pairs = Pairs([[5, 6], [7]], [[8], [9]], max_length=8)
    >>> next(pairs.batches(64)).source[:, :4].tolist()
    [[5, 6, 2, 0], [7, 2, 0, 0]]
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        max_length: int,
        device: torch.device | str = "cpu",
    ) -> None:
        lengths = [max(len(source), len(target)) + 1 for source, target in zip(sources, targets, strict=True)]
        if max(lengths, default=0) > max_length:
            raise ValueError(
                f"a sentence has {max(lengths)} subwords, but max_length is {max_length}; a larger "
                "vocabulary makes sentences shorter"
            )
        widths = [min(-(-length // WIDTH_STEP) * WIDTH_STEP, max_length) for length in lengths]
        self._rows_of_width = {
            width: torch.tensor([row for row, own in enumerate(widths) if own == width])
            for width in sorted(set(widths))
        }
        longest = max(widths, default=0)
        self.sources = _padded(([*row, END] for row in sources), longest).to(device)
        self.targets = _padded(([BEGIN, *row, END] for row in targets), longest + 1).to(device)

    def __len__(self) -> int:
        return len(self.sources)

    def num_batches(self, tokens: int) -> int:
        """How many `batches` there are."""
        return sum(-(-len(rows) // _height(tokens, width)) for width, rows in self._rows_of_width.items())

    def batches(self, tokens: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """All pairs once, up to ``tokens`` positions a side and batch; in random order with a generator."""
        plan: list[tuple[int, Tensor]] = []
        for width, rows in self._rows_of_width.items():
            order = rows if generator is None else rows[torch.randperm(len(rows), generator=generator)]
            plan += ((width, chunk) for chunk in order.split(_height(tokens, width)))
        if generator is not None:
            plan = [plan[i] for i in torch.randperm(len(plan), generator=generator).tolist()]
        return self._gathered(plan)

    def by_length(self, count: int) -> Iterator[Batch]:
        """All pairs once, ``count`` in a batch, from the shortest to the longest."""
        rows = torch.cat(list(self._rows_of_width.values()))
        widths = torch.cat([torch.full_like(own, width) for width, own in self._rows_of_width.items()])
        widest = [int(chunk[-1]) for chunk in widths.split(count)]
        return self._gathered(list(zip(widest, rows.split(count), strict=True)))

    def _gathered(self, plan: list[tuple[int, Tensor]]) -> Iterator[Batch]:
        # One transfer for all batches: a step must not wait for the host.
        chunks = torch.cat([chunk for _, chunk in plan]).to(self.sources.device)
        for (width, _), rows in zip(plan, chunks.split([len(chunk) for _, chunk in plan]), strict=True):
            yield Batch(self.sources[rows, :width], self.targets[rows, : width + 1], rows)


def _height(tokens: int, width: int) -> int:
    return max(1, tokens // width)


def _padded(rows: Iterator[list[int]], width: int) -> Tensor:
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
