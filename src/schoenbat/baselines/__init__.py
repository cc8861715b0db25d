"""The attentions that SchoenbAt is compared with, all with the call of ``SchoenbAt``."""

from schoenbat.baselines.controls import Mean, NoMixing
from schoenbat.baselines.softmax import Softmax

__all__ = ["Mean", "NoMixing", "Softmax"]
