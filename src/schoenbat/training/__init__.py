"""Models that take any attention by name, and the loop that trains them."""

from schoenbat.training.classifier import Classifier
from schoenbat.training.loop import Examples, Progress, TrainingOptions, TrainingResult, accuracy, train

__all__ = ["Classifier", "Examples", "Progress", "TrainingOptions", "TrainingResult", "accuracy", "train"]
