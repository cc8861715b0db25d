"""The attentions that SchoenbAt is compared with, all with the call of ``SchoenbAt``."""

from schoenbat.baselines.bigbird import BigBird
from schoenbat.baselines.controls import Mean, NoMixing
from schoenbat.baselines.cosformer import CosFormer
from schoenbat.baselines.informer import Informer
from schoenbat.baselines.nystromformer import Nystromformer
from schoenbat.baselines.performer import Performer
from schoenbat.baselines.reformer import Reformer
from schoenbat.baselines.rfa import RFA
from schoenbat.baselines.skyformer import Skyformer
from schoenbat.baselines.softmax import Softmax

__all__ = [
    "RFA",
    "BigBird",
    "CosFormer",
    "Informer",
    "Mean",
    "NoMixing",
    "Nystromformer",
    "Performer",
    "Reformer",
    "Skyformer",
    "Softmax",
]
