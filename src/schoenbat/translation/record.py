"""What the experiment leaves behind, and what a later call takes over from it."""

import json
from dataclasses import dataclass
from pathlib import Path

from schoenbat.training.checkpoint import refuse_other_options
from schoenbat.translation.options import TranslationOptions

EXPERIMENT = "translate"


@dataclass(frozen=True)
class EpochRow:
    """One attention after one epoch. Losses are means over tokens of ``−log p``, without label smoothing."""

    attention: str
    seed: int
    epoch: int
    train_loss: float
    """Over the epoch, with dropout."""
    validation_loss: float
    perplexity: float
    """``exp(validation_loss)``, of a subword."""
    validation_bleu: float
    """By greedy search."""
    seconds: float
    """Of the epoch's steps, without evaluation."""
    parameters: int
    test_bleu_greedy: float | None = None
    """Of the epoch with the lowest validation loss; None for all others, which were not tested."""
    test_bleu_beam: float | None = None


def read_rows(path: Path, options: TranslationOptions) -> list[EpochRow]:
    """The rows that ``path`` holds; none where there is no file.

    Raises:
        CheckpointError: if they were made with other options, attentions aside.
        ValueError: if it is no result file of this experiment.
    """
    if not path.exists():
        return []
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["experiment"] != EXPERIMENT:
            raise ValueError(f"its experiment is {results['experiment']!r}, not {EXPERIMENT!r}")
        rows = [EpochRow(**row) for row in results["rows"]]
        saved = {name: value for name, value in results["options"].items() if name != "attentions"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no result to go on with ({error!r}); delete it") from error
    refuse_other_options(path, saved, json.loads(json.dumps(options.identity)))
    return rows


def attentions_of(rows: list[EpochRow]) -> tuple[str, ...]:
    """The attentions that were trained, in their order."""
    return tuple(dict.fromkeys(row.attention for row in rows))
