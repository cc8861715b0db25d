"""Training of a classifier, short enough to be read at once."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Examples:
    """Sequences and what they are: ``tokens`` ``(N, n)`` padded with 0, ``labels`` ``(N,)``."""

    tokens: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def majority_share(self) -> float:
        """The accuracy of always answering the most frequent label."""
        return self.labels.bincount().max().item() / len(self)


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how fast to train; the learning rate rises for ``warmup`` steps, then falls to zero."""

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    evaluate_every: int = 100
    seed: int = 0

    def learning_rate_factor(self, step: int) -> float:
        return min((step + 1) / max(1, self.warmup), (self.steps - step) / max(1, self.steps - self.warmup))


@dataclass(frozen=True)
class Progress:
    """After ``step`` steps: the mean loss since the last report, and the accuracy on validation data."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class TrainingResult:
    """The reports of one training run and the time it took, its evaluations included."""

    history: list[Progress]
    seconds: float

    @property
    def accuracy(self) -> float:
        """The accuracy on validation data after the last step."""
        return self.history[-1].accuracy


def train(
    model: nn.Module,
    training: Examples,
    validation: Examples,
    options: TrainingOptions,
    on_step: Callable[[int], None] = lambda step: None,
) -> TrainingResult:
    """Train ``model`` on random batches with AdamW; ``on_step`` is called with the number of steps done.

    The order of the batches follows ``options.seed``; dropout follows torch's global generator.
    """
    started = time.perf_counter()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, options.learning_rate_factor)
    batches = _batches(len(training), options)
    losses: list[float] = []
    history: list[Progress] = []
    model.train()
    for step, batch in enumerate(batches, start=1):
        loss = F.cross_entropy(model(training.tokens[batch]), training.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.max_gradient_norm)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % options.evaluate_every == 0 or step == options.steps:
            history.append(Progress(step, sum(losses) / len(losses), accuracy(model, validation)))
            losses.clear()
        on_step(step)
    return TrainingResult(history, time.perf_counter() - started)


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples, batch_size: int = 256) -> float:
    """The share of ``examples`` that ``model`` classifies correctly, in eval mode."""
    was_training = model.training
    model.eval()
    correct = sum(
        (model(tokens).argmax(-1) == labels).sum().item()
        for tokens, labels in zip(
            examples.tokens.split(batch_size), examples.labels.split(batch_size), strict=True
        )
    )
    model.train(was_training)
    return correct / len(examples)


def _batches(count: int, options: TrainingOptions) -> list[Tensor]:
    """One tensor of example indices for each step, each pass over the examples in an order of its own."""
    generator = torch.Generator().manual_seed(options.seed)
    passes = -(-options.steps * options.batch_size // count)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(passes)])
    return list(order.split(options.batch_size)[: options.steps])
