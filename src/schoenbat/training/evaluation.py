"""How often a model is right."""

import torch
from lightning.fabric import Fabric
from torch import nn

from schoenbat.training.batches import DeviceSplit
from schoenbat.training.interruption import Interrupted, StopRequest


@torch.no_grad()
def accuracy(
    fabric: Fabric,
    model: nn.Module,
    split: DeviceSplit,
    batch_size: int,
    stop: StopRequest | None = None,
) -> float:
    """The share of right answers over all devices, in eval mode.

    Raises:
        Interrupted: if ``stop`` is given and arrives.
    """
    inside = torch.arange(batch_size, device=fabric.device)
    right = torch.zeros((), dtype=torch.int64, device=fabric.device)
    was_training = model.training
    model.eval()
    # Every batch is full, so that no shape is new: the last one begins again at the front, uncounted. All
    # devices run as many: they may have to put their weights together for each.
    for first in range(0, len(split), fabric.world_size * batch_size):
        start = first + fabric.global_rank * batch_size
        if stop:
            raise Interrupted(f"stopped while testing, at example {start:,} of {len(split):,}", stop.number)
        index = start + inside
        batch = split.batch(index % len(split))
        answers = model(batch.tokens, batch.mask).argmax(-1)
        right += ((answers == batch.labels) & (index < len(split))).sum()
    model.train(was_training)
    if fabric.world_size > 1:
        torch.distributed.all_reduce(right)
    return right.item() / max(1, len(split))
