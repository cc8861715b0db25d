"""One training step as a fixed sequence of kernels, so that a CUDA graph can hold all of it.

Which batch and which learning rate come next stand in tensors; nothing is read back while steps run.
"""

from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from schoenbat.training.batches import DeviceSplit
from schoenbat.training.failure import explain_failure
from schoenbat.training.processes import local
from schoenbat.training.replay import Replayed


class Tally(NamedTuple):
    """Over all steps since the last report: the mean loss, and the share of right answers."""

    loss: float
    accuracy: float


class TrainingStep:
    """Gather a batch, run the model forwards and backwards, clip, and update the weights.

    Args:
        fabric: devices and precision.
        model: set up by ``fabric``.
        optimizer: set up by ``fabric``; fused AdamW, whose learning rate is a tensor.
        split: the training examples.
        order: the numbers of the examples of each step on this device, ``(steps, B)``.
        rates: the learning rate of each step, ``(steps,)``.
        clip_value: gradients are clipped to ± this.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        split: DeviceSplit,
        order: Tensor,
        rates: Tensor,
        clip_value: float,
    ) -> None:
        self.fabric, self.model, self.optimizer = fabric, model, optimizer
        self.split, self.order, self.rates, self.clip_value = split, order, rates, clip_value
        device = order.device
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
        self.num_right = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_seen = torch.zeros(1, dtype=torch.int64, device=device)
        # Once set, the optimizer leaves the weights alone, so that the failing step can be looked at.
        self.failed = torch.zeros((), dtype=torch.float32, device=device)
        self.failed_at = torch.zeros(1, dtype=torch.int64, device=device)
        unwrapped: Any = getattr(optimizer, "optimizer", optimizer)
        unwrapped.found_inf = self.failed
        self.learning_rate = optimizer.param_groups[0]["lr"]
        self.run = Replayed(self._step, captures=device.type == "cuda" and fabric.world_size == 1)
        """Run the next step."""

    def counters(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of the step itself: sums over all devices, which all call."""
        sums = self._sums()
        if self.fabric.world_size > 1:
            sums = {name: counter.clone() for name, counter in sums.items()}
            for counter in sums.values():
                torch.distributed.all_reduce(counter)
        return {"position": self.position, **sums}

    def _sums(self) -> dict[str, Tensor]:
        return {"loss_sum": self.loss_sum, "num_right": self.num_right, "num_seen": self.num_seen}

    def tally(self) -> Tally:
        """What happened on all devices since the last call; waits for them.

        Raises:
            NonFiniteError: if a loss or gradient was NaN or infinite.
        """
        self.raise_if_failed()
        total = {name: counter.item() for name, counter in self.counters().items()}
        for counter in self._sums().values():
            counter.zero_()
        seen = max(1, total["num_seen"])
        return Tally(total["loss_sum"] / seen, total["num_right"] / seen)

    def raise_if_failed(self) -> None:
        """Raise NonFiniteError if a loss or gradient was NaN or infinite; waits for the device."""
        if self.failed.item():
            position = int(self.failed_at.item())
            batch = self.split.batch(self.order[position])
            raise explain_failure(self.fabric, self.model, batch, position + 1, self.rates[position].item())

    def restore(self, counters: dict[str, Tensor]) -> None:
        """Continue from what `counters` was; the first device goes on with the sums of all."""
        self.position.copy_(counters["position"])
        for name, counter in self._sums().items():
            counter.copy_(counters[name])
            if not self.fabric.is_global_zero:
                counter.zero_()

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.learning_rate.copy_(self.rates[self.position].squeeze())
        batch = self.split.batch(self.order[self.position].squeeze(0))
        logits = self.model(batch.tokens, batch.mask).float()
        loss = F.cross_entropy(logits, batch.labels)
        self.fabric.backward(loss)
        self._check(loss.detach())
        nn.utils.clip_grad_value_(self.model.parameters(), self.clip_value)
        self.optimizer.step()
        self.loss_sum += loss.detach() * len(batch.labels)
        self.num_right += (logits.detach().argmax(-1) == batch.labels).sum()
        self.num_seen += len(batch.labels)
        self.position += 1

    def _check(self, loss: Tensor) -> None:
        """Note the first step that is not finite; all devices come to the same answer."""
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        healthy = loss.isfinite() & nn.utils.get_total_norm(gradients).isfinite()
        bad = 1.0 - healthy.float()
        if self.fabric.world_size > 1:
            bad = self.fabric.all_reduce(bad, reduce_op="sum").clamp(max=1.0)  # type: ignore[union-attr]
        first = (self.failed == 0) & (bad > 0)
        self.failed_at.copy_(torch.where(first, self.position, self.failed_at))
        self.failed.copy_(torch.maximum(self.failed, bad))
