"""A two-layer classifier of short ListOps expressions, trained with one attention beside another."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from schoenbat.data import listops
from schoenbat.training import Classifier, Examples, TrainingOptions, TrainingResult, train

NUM_CLASSES = 10


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

    def training_options(self) -> TrainingOptions:
        return TrainingOptions(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            warmup=self.steps // 8,
            evaluate_every=max(1, self.steps // 8),
            seed=self.seed,
        )


@dataclass(frozen=True)
class DemoRow:
    """How one attention did."""

    attention: str
    parameters: int
    accuracy: float
    """On validation examples, after the last step."""
    majority: float
    """The accuracy of always answering the most frequent label."""
    result: TrainingResult


def listops_split(options: DemoOptions) -> tuple[Examples, Examples]:
    """Training and validation examples; no expression is in both."""
    tokens, _, labels = listops.generate(
        options.num_training + options.num_validation,
        options.seed,
        min_length=options.min_length,
        max_length=options.max_length,
    )
    sizes = [options.num_training, options.num_validation]
    parts = zip(
        torch.from_numpy(tokens).long().split(sizes), torch.from_numpy(labels).split(sizes), strict=True
    )
    training, validation = (Examples(*part) for part in parts)
    return training, validation


def train_one(
    attention: str,
    split: tuple[Examples, Examples],
    options: DemoOptions,
    on_step: Callable[[int], None] = lambda step: None,
) -> DemoRow:
    """Train the classifier with one attention; all start from the same seed and see the same batches."""
    training, validation = split
    torch.manual_seed(options.seed)
    model = Classifier(
        attention,
        vocab_size=len(listops.VOCABULARY),
        num_classes=NUM_CLASSES,
        max_length=options.max_length,
        dropout=0.0,
    )
    result = train(model, training, validation, options.training_options(), on_step)
    return DemoRow(
        attention=attention,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        accuracy=result.accuracy,
        majority=validation.majority_share(),
        result=result,
    )
