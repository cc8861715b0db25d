"""Where numbers stop being finite."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from schoenbat.training.batches import Batch


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


def explain_failure(model: nn.Module, batch: Batch, step: int, learning_rate: float) -> NonFiniteError:
    """Run the batch of a failed step again, without dropout, and say where it goes wrong.

    That is the first module whose output is not finite, else the last parameter whose gradient is not.
    """
    found: list[str] = []
    was_training = model.training
    model.eval()
    try:
        with _watched(model, found):
            loss = F.cross_entropy(model(batch.tokens, batch.mask).float(), batch.labels)
        if not found:
            loss.backward()
            found += [
                f"{name}, backward"
                for name, parameter in reversed(list(model.named_parameters()))
                if parameter.grad is not None and not parameter.grad.isfinite().all()
            ]
    finally:
        model.zero_grad()
        model.train(was_training)
    return NonFiniteError(step, learning_rate, found[0] if found else None, loss.item())


@contextmanager
def _watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    """While inside, modules whose output is not finite write their names down, innermost first."""

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                found.append(f"{name} ({type(module).__name__}), forward")

        return look

    # Fabric wraps a model; the names of what it was given are those that people know.
    module = getattr(model, "module", model)
    handles = [module.register_forward_hook(watch(name)) for name, module in module.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
