"""Batches that are gathered on the device: the data lie there as bytes, and a batch is a row of numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from schoenbat.data.task import Split


@dataclass(frozen=True)
class Batch:
    """``tokens`` and ``mask`` ``(B, n)``, or ``(B, 2, n)`` for pairs; ``labels`` ``(B,)``."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor


class DeviceSplit:
    """A split of a task on a device; splits that are given the same ``stores`` share their sequences there.

    >>> import numpy as np
    >>> store = np.array([[3, 0, 2, 0], [4, 0, 0, 0]], dtype=np.uint8)
    >>> split = DeviceSplit(Split(store, np.array([3, 1]), np.array([1, 0]), np.array([1, 7])), "cpu")
    >>> batch = split.batch(torch.tensor([1]))
    >>> batch.tokens.tolist(), batch.labels.tolist()
    ([[3, 0, 2, 0]], [7])
    """

    def __init__(
        self, split: Split, device: torch.device | str, stores: dict[int, Tensor] | None = None
    ) -> None:
        stores = {} if stores is None else stores
        if id(split.sequences) not in stores:
            # A copy on the host first: the arrays may be read-only views of a file.
            stores[id(split.sequences)] = torch.tensor(split.sequences).to(device)
        self.sequences = stores[id(split.sequences)]
        self.sequence_lengths = torch.tensor(split.sequence_lengths, dtype=torch.int64, device=device)
        self.members = torch.tensor(split.members, dtype=torch.int64, device=device)
        self.labels = torch.tensor(split.labels, dtype=torch.int64, device=device)
        self.hide_zeros = split.hide_zeros

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor) -> Batch:
        """The examples of the numbers ``index`` ``(B,)``."""
        members = self.members[index]
        tokens = self.sequences[members].long()
        if self.hide_zeros:
            mask = tokens != 0
        else:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
            mask = positions < self.sequence_lengths[members].unsqueeze(-1)
        return Batch(tokens, mask, self.labels[index])


def batch_order(num_examples: int, batch_size: int, steps: int, seed: int) -> Tensor:
    """Which examples each step sees, ``(steps, batch_size)``: pass after pass, each in an order of its own.

    >>> batch_order(4, 2, 3, seed=0).flatten()[:4].sort().values.tolist()
    [0, 1, 2, 3]
    """
    if num_examples == 0:
        raise ValueError("the training split is empty")
    generator = torch.Generator().manual_seed(seed)
    passes = -(-steps * batch_size // num_examples)
    order = torch.cat([torch.randperm(num_examples, generator=generator) for _ in range(passes)])
    return order[: steps * batch_size].view(steps, batch_size)
