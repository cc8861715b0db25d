"""How a task of the Long Range Arena is trained: the published settings, each of them an option.

The batch of Text is 32: the paper's text says 16, its code and its table of memory 32. Its code evaluates
Image every 50 steps and selects Text's checkpoints on the test set; here Image is evaluated every 500 steps,
and Text has a validation set split off its training set. It trains in float16 with a scaler; here it is
bfloat16. Its schedule also moves Adam's first beta, between 0.85 and 0.95; here that is 0.9 throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from schoenbat.options import check_count, check_number

# Settings that change nothing of what a single step costs.
OF_WHOLE_RUNS = ("steps", "warmup", "evaluate_every", "learning_rate", "select_after")
_STEPS = 10_000


@dataclass(frozen=True)
class Protocol:
    """The settings of a training run.

    The learning rate rises in a line from ``learning_rate / 25`` to ``learning_rate`` over ``warmup`` steps,
    then falls in a line to ``learning_rate / 250,000``. Gradients are clipped by value. The checkpoint of the
    best validation accuracy after ``select_after`` of the steps decides the test figure.

    >>> Protocol.paper("listops").learning_rate_at(0)
    4e-06
    """

    batch_size: int
    learning_rate: float
    warmup: int
    evaluate_every: int
    embedding_rows: int
    steps: int = _STEPS
    dropout: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    clip_value: float = 1.0
    select_after: float = 0.2
    hide_zeros: bool = True
    """Leave out every token 0, on images too (black pixels), not only padding."""

    @classmethod
    def paper(cls, task: str, **changes: Any) -> "Protocol":
        """The published settings of a task, but for ``changes``.

        With another number of steps, the warm-up keeps its share of them.

        >>> Protocol.paper("text", steps=500).warmup
        4
        """
        if task not in _PAPER:
            raise ValueError(f"unknown task {task!r}; known are {', '.join(_PAPER)}")
        published = _PAPER[task]
        steps = changes.get("steps", published.steps)
        _check_integer("steps", steps)
        shorter = replace(
            published,
            warmup=max(1, round(Fraction(published.warmup * steps, published.steps))),
            evaluate_every=min(published.evaluate_every, max(1, steps)),
        )
        return replace(shorter, **changes)

    def __post_init__(self) -> None:
        for name in ("steps", "warmup", "batch_size", "evaluate_every", "embedding_rows"):
            _check_integer(name, getattr(self, name))
        check_number("learning_rate", self.learning_rate)
        check_number("dropout", self.dropout, 0, 1)
        check_number("eps", self.eps, 0)
        check_number("weight_decay", self.weight_decay, 0)
        check_number("select_after", self.select_after, 0, 1)
        check_count("embedding_rows", self.embedding_rows)
        if not check_number("clip_value", self.clip_value, 0):
            raise ValueError("clip_value is above 0, got 0: no gradient would be left")
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2 or max(self.betas) >= 1:
            raise ValueError(f"betas are two numbers from 0 to below 1, got {self.betas!r}")
        for beta in self.betas:
            check_number("betas", beta, 0, 1)
        if self.steps < 2 or not 0 < self.warmup < self.steps:
            raise ValueError(
                f"training needs at least 2 steps, and a warm-up of 1 to steps - 1 of them; got "
                f"steps={self.steps}, warmup={self.warmup}"
            )
        if self.batch_size < 1 or self.evaluate_every < 1:
            raise ValueError(
                "batch_size and evaluate_every are at least 1, got "
                f"batch_size={self.batch_size}, evaluate_every={self.evaluate_every}"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is above 0, got {self.learning_rate}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of the step after ``step`` steps."""
        first, last = self.learning_rate / 25, self.learning_rate / 250_000
        peak = self.warmup - 1
        if step <= peak:
            return _between(first, self.learning_rate, step / peak if peak else 1.0)
        return _between(self.learning_rate, last, (step - peak) / (self.steps - 1 - peak))

    def selects(self, step: int) -> bool:
        """Whether the model after ``step`` steps may become the one that is tested."""
        return step >= self.select_after * self.steps


def _check_integer(name: str, value: Any) -> None:
    if not isinstance(value, int):
        raise ValueError(f"{name} is an integer, got {value!r}")


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


_PAPER = {
    "listops": Protocol(32, 1e-4, warmup=1000, evaluate_every=500, embedding_rows=32),
    "text": Protocol(32, 1e-4, warmup=80, evaluate_every=500, embedding_rows=512),
    "retrieval": Protocol(16, 2e-4, warmup=800, evaluate_every=1000, embedding_rows=512),
    "pathfinder": Protocol(128, 2e-4, warmup=312, evaluate_every=500, embedding_rows=512),
    "image": Protocol(256, 1e-4, warmup=175, evaluate_every=500, embedding_rows=256),
}
