"""A two-layer classifier of short ListOps expressions, trained with one attention beside another."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from schoenbat.data import listops
from schoenbat.data.task import Split, Task
from schoenbat.training.protocol import Protocol
from schoenbat.training.run import Progress, RunOptions, train


@dataclass(frozen=True)
class DemoOptions:
    """Which attentions, and how much training; ``"mean"`` shows what is reached without looking at logits."""

    attentions: tuple[str, ...] = ("softmax", "schoenbat", "mean")
    num_training: int = 6000
    num_validation: int = 500
    min_length: int = 20
    max_length: int = 80
    steps: int = 200
    batch_size: int = 32
    learning_rate: float = 2e-3
    seed: int = 0

    def run_options(self, attention: str) -> RunOptions:
        every = max(1, self.steps // 8)
        protocol = Protocol(
            self.batch_size,
            self.learning_rate,
            warmup=every,
            evaluate_every=every,
            embedding_rows=len(listops.VOCABULARY),
            steps=self.steps,
            dropout=0.0,
            weight_decay=0.01,
        )
        return RunOptions(
            "listops", attention, protocol, seed=self.seed, accelerator="cpu", report_every=every
        )


@dataclass(frozen=True)
class Point:
    """After ``step`` steps: the mean loss since the last point, and the accuracy on validation data."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class DemoRow:
    """How one attention did."""

    attention: str
    parameters: int
    accuracy: float
    """On validation examples, after the last step."""
    majority: float
    """The accuracy of always answering the most frequent label."""
    seconds: float
    """Of all steps, without evaluations."""
    history: list[Point]


def listops_task(options: DemoOptions) -> Task:
    """Short expressions; no expression of the training split is in the validation split."""
    count = options.num_training + options.num_validation
    tokens, lengths, labels = listops.generate(
        count, options.seed, min_length=options.min_length, max_length=options.max_length
    )
    members = np.arange(count)
    training, validation = (
        Split(tokens, lengths, members[rows], labels[rows])
        for rows in (slice(options.num_training), slice(options.num_training, None))
    )
    return Task(
        name="listops",
        vocab_size=len(listops.VOCABULARY),
        num_classes=10,
        max_length=options.max_length,
        paired=False,
        train=training,
        validation=validation,
        test=validation,
        fingerprint=f"{count} short expressions, seed {options.seed}",
    )


def train_one(
    attention: str,
    task: Task,
    options: DemoOptions,
    on_step: Callable[[int], None] = lambda step: None,
) -> DemoRow:
    """Train the classifier with one attention; all start from the same seed and see the same batches."""
    losses: dict[int, float] = {}
    history: list[Point] = []

    def on_progress(progress: Progress) -> None:
        if progress.loss is not None:
            losses[progress.step] = progress.loss
        elif progress.validation is not None:
            history.append(Point(progress.step, losses[progress.step], progress.validation))
        elif progress.evaluates is None:
            on_step(progress.step)

    with tempfile.TemporaryDirectory() as directory:
        record = train(task, options.run_options(attention), Path(directory), on_progress=on_progress)
    if record is None:
        raise RuntimeError("the run on one device left no record")
    return DemoRow(
        attention=attention,
        parameters=record.parameters,
        accuracy=history[-1].accuracy,
        majority=record.majority,
        seconds=(record.step_seconds or 0.0) * record.steps,
        history=history,
    )
