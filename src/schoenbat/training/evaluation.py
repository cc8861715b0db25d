"""How often a model is right."""

import torch
from lightning.fabric import Fabric
from torch import nn

from schoenbat.training.batches import DeviceSplit
from schoenbat.training.interruption import Interrupted, StopRequest
from schoenbat.training.replay import Replayed


class Evaluation:
    """The share of right answers over all devices, in eval mode.

    Args:
        fabric: devices and precision.
        model: set up by ``fabric``.
        split: the examples.
        batch_size: of each device.
    """

    def __init__(self, fabric: Fabric, model: nn.Module, split: DeviceSplit, batch_size: int) -> None:
        self.fabric, self.model, self.split = fabric, model, split
        self.stride = fabric.world_size * batch_size
        self.inside = torch.arange(batch_size, device=fabric.device) + fabric.global_rank * batch_size
        self.first = torch.zeros(1, dtype=torch.int64, device=fabric.device)
        self.right = torch.zeros((), dtype=torch.int64, device=fabric.device)
        self._count = Replayed(
            self._count_batch, captures=fabric.device.type == "cuda" and fabric.world_size == 1
        )

    @torch.no_grad()
    def accuracy(self, stop: StopRequest | None = None) -> float:
        """The share of right answers.

        Raises:
            Interrupted: if ``stop`` is given and arrives.
        """
        self.first.zero_()
        self.right.zero_()
        was_training = self.model.training
        self.model.eval()
        try:
            # All devices run as many batches: they may have to put their weights together for each.
            for first in range(0, len(self.split), self.stride):
                if stop:
                    raise Interrupted(
                        f"stopped while testing, at example {first:,} of {len(self.split):,}", stop.number
                    )
                self._count()
        finally:
            self.model.train(was_training)
        if self.fabric.world_size > 1:
            torch.distributed.all_reduce(self.right)
        return self.right.item() / max(1, len(self.split))

    def _count_batch(self) -> None:
        # Every batch is full, so that no shape is new: the last one begins again at the front, uncounted.
        index = self.first + self.inside
        batch = self.split.batch(index % len(self.split))
        answers = self.model(batch.tokens, batch.mask).argmax(-1)
        self.right += ((answers == batch.labels) & (index < len(self.split))).sum()
        self.first += self.stride
