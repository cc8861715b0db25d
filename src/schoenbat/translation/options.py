"""What a translation experiment is asked to be."""

from dataclasses import asdict, dataclass, field
from typing import Any

from schoenbat.options import check_count, check_device, check_number, check_seed

# Softmax without and with ppSBN: the paper's figure. Past it SchoenbAt, by default and as the paper has it.
ATTENTIONS = (
    "softmax",
    "softmax:qk_norm=true,scale=none",
    "schoenbat",
    "schoenbat:construction=paper,normalization=token,scale=none",
)


@dataclass(frozen=True)
class TranslationOptions:
    """Attentions, model and training; the same for all attentions.

    The learning rate rises to ``learning_rate`` over the share ``warmup`` of all steps, and falls to almost
    nothing (one cycle).
    """

    attentions: tuple[str, ...] = ATTENTIONS
    epochs: int = 20
    seed: int = 0
    """Of weights, feature maps, batches and dropout."""
    device: str = "cpu"
    vocab_size: int = 8000
    dim: int = 256
    num_heads: int = 4
    hidden_dim: int = 1024
    num_layers: int = 3
    max_length: int = 64
    """Of a sentence in subwords, its end included."""
    dropout: float = 0.2
    label_smoothing: float = 0.1
    """Of what is trained on; losses are reported without."""
    learning_rate: float = 1e-3
    warmup: float = 0.15
    batch_tokens: int = 4096
    """Positions a side and batch, padding included."""
    clip_norm: float = 1.0
    num_training: int | None = None
    """How many training pairs are used; None for all."""
    num_evaluation: int | None = None
    """How many pairs of validation and of test are used; None for all."""
    beam_size: int = 5
    length_penalty: float = 1.0
    data: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each file of the corpus."""

    def __post_init__(self) -> None:
        for name in ("epochs", "vocab_size", "dim", "num_heads", "hidden_dim", "num_layers", "max_length"):
            check_count(name, getattr(self, name))
        for name in ("batch_tokens", "beam_size"):
            check_count(name, getattr(self, name))
        check_seed(self.seed)
        check_number("dropout", self.dropout, 0, 1)
        check_number("label_smoothing", self.label_smoothing, 0, 1)
        check_number("learning_rate", self.learning_rate, 0)
        if not self.attentions:
            raise ValueError("there is no attention to train with; name one with --attentions")
        check_device(self.device)

    @classmethod
    def quick(cls, **options: Any) -> "TranslationOptions":
        """A small model and few sentences: that everything works, not how well."""
        small: dict[str, Any] = {
            "epochs": 3,
            "vocab_size": 2000,
            "dim": 64,
            "num_heads": 2,
            "hidden_dim": 128,
            "num_layers": 1,
            "max_length": 96,
            "dropout": 0.1,
            "learning_rate": 3e-3,
            "batch_tokens": 1024,
            "num_training": 600,
            "num_evaluation": 20,
        }
        return cls(**small | options)

    @property
    def identity(self) -> dict[str, Any]:
        """What two calls must have in common for their results to stand side by side."""
        return {name: value for name, value in asdict(self).items() if name != "attentions"}

    @property
    def model(self) -> dict[str, Any]:
        """What a `Translator` takes of these."""
        names = ("max_length", "dim", "num_heads", "hidden_dim", "num_layers", "dropout")
        return {name: getattr(self, name) for name in names}
