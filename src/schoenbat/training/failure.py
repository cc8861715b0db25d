"""Where numbers stop being finite."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from schoenbat.training.batches import Batch
from schoenbat.training.processes import local


class NonFiniteError(RuntimeError):
    """A loss or gradient that is NaN or infinite."""

    def __init__(self, step: int, learning_rate: float, layer: str | None, loss: float) -> None:
        self.step, self.learning_rate, self.layer = step, learning_rate, layer
        where = f"first in {layer}" if layer else "in no layer when its batch was run again without dropout"
        super().__init__(
            f"step {step}: loss {loss:.3g} or its gradient is not finite, {where}; the learning rate was "
            f"{learning_rate:.3g}. The last good checkpoint is kept. Try a smaller --learning-rate, a longer "
            "--warmup, or --precision 32-true"
        )


def explain_failure(
    fabric: Fabric, model: nn.Module, batch: Batch, step: int, learning_rate: float
) -> NonFiniteError:
    """Run the batch of a failed step again, without dropout, and say where it goes wrong.

    That is the first module whose output is not finite, else the last parameter whose gradient is not, on
    the first device that finds one.
    """
    # Fabric wraps a model; the names of what it was given are those that people know.
    module = getattr(model, "module", model)
    outputs: list[str] = []
    was_training = model.training
    model.eval()
    try:
        with _watched(module, outputs):
            loss = F.cross_entropy(model(batch.tokens, batch.mask).float(), batch.labels)
        # On all devices, whatever they have found: each waits for the others' gradients.
        fabric.backward(loss)
        gradients = [
            f"{name}, backward"
            for name, parameter in reversed(list(module.named_parameters()))
            if parameter.grad is not None and not local(parameter.grad).isfinite().all()
        ]
    finally:
        model.zero_grad()
        model.train(was_training)
    found = _of_all_devices(fabric, outputs[:1]) or _of_all_devices(fabric, gradients[:1])
    return NonFiniteError(step, learning_rate, found[0] if found else None, loss.item())


def _of_all_devices(fabric: Fabric, names: list[str]) -> list[str]:
    if fabric.world_size == 1:
        return names
    gathered: list[list[str]] = [[] for _ in range(fabric.world_size)]
    torch.distributed.all_gather_object(gathered, names)
    return [name for own in gathered for name in own]


@contextmanager
def _watched(module: nn.Module, found: list[str]) -> Iterator[None]:
    """While inside, modules whose output is not finite write their names down, innermost first."""

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                found.append(f"{name} ({type(module).__name__}), forward")

        return look

    handles = [part.register_forward_hook(watch(name)) for name, part in module.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
