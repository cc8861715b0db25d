"""What a run is asked to be."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from schoenbat.options import check_seed
from schoenbat.training.protocol import Protocol
from schoenbat.training.record import WARM_STEPS


def runs_on_cuda(accelerator: str) -> bool:
    """Whether a run goes to a GPU on this machine."""
    return accelerator in ("auto", "cuda") and torch.cuda.is_available()


def default_precision(accelerator: str) -> str:
    """What a run is trained in where nobody says."""
    return "bf16-mixed" if runs_on_cuda(accelerator) else "32-true"


def check_timing(steps: int) -> None:
    """Refuse to time so few steps that all of them are warm-up.

    >>> check_timing(11)
    """
    if steps <= WARM_STEPS:
        raise ValueError(f"the first {WARM_STEPS} steps are not timed; --timing needs more, got {steps}")


@dataclass(frozen=True)
class RunOptions:
    """What is trained, by which protocol, and on what."""

    task: str
    attention: str
    protocol: Protocol
    seed: int = 0
    accelerator: str = "auto"
    devices: int = 1
    strategy: str = "auto"
    """What several devices share: ``"ddp"``, gradients; ``"fsdp"``, weights and optimizer too."""
    precision: str = "32-true"
    """Or ``"bf16-mixed"``: products in bfloat16, weights and attention's state in float32."""
    compiled: bool = False
    """Whether ``torch.compile`` runs the model."""
    timing: bool = False
    """Only time 200 steps: no evaluation, no checkpoint."""
    alone: bool = True
    report_every: int = 50
    checkpoint_seconds: float = 60.0
    """What is saved after so many seconds is not lost when a run is killed."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.timing:
            check_timing(self.protocol.steps)

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in with the run that continues from it, on any number of devices."""
        kept = {"task", "attention", "seed", "protocol", "precision", "report_every"}
        return {name: value for name, value in asdict(self).items() if name in kept}
