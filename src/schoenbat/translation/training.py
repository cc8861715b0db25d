"""Training with one attention: epoch after epoch, each with its losses and the BLEU of what it translates."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schoenbat.data.multi30k import Multi30k, Sentences
from schoenbat.translation.batches import Batch, Pairs
from schoenbat.translation.bleu import bleu
from schoenbat.translation.decoding import beams, greedy, translate
from schoenbat.translation.model import Translator
from schoenbat.translation.options import TranslationOptions
from schoenbat.translation.record import EpochRow
from schoenbat.translation.tokenizer import PAD, Subwords

Progress = Callable[[str, int], None]
"""Called with what is being done, in words, and with how many steps are done."""
# A terminal is redrawn often enough.
_REPORT_EVERY = 10
# Beyond it a perplexity is no number any more.
_LARGEST_LOSS = 700.0


@dataclass(frozen=True)
class Encoded:
    """The corpus as one vocabulary spells it, on a device, with the references of what is translated."""

    subwords: Subwords
    train: Pairs
    validation: Pairs
    test: Pairs
    validation_references: list[str]
    test_references: list[str]


def encode(corpus: Multi30k, options: TranslationOptions) -> Encoded:
    """Train a vocabulary on the training split and spell all splits in it."""
    train = corpus.train.first(options.num_training)
    validation, test = (split.first(options.num_evaluation) for split in (corpus.validation, corpus.test))
    subwords = Subwords(train, options.vocab_size)

    def pairs(sentences: Sentences) -> Pairs:
        sources, targets = subwords.encode(sentences.german), subwords.encode(sentences.english)
        return Pairs(sources, targets, options.max_length, options.device)

    return Encoded(subwords, pairs(train), pairs(validation), pairs(test), validation.english, test.english)


def build(attention: str, vocab_size: int, options: TranslationOptions) -> Translator:
    """The model as it starts out, drawn from the seed."""
    torch.manual_seed(options.seed)
    return Translator(attention, vocab_size=vocab_size, **options.model).to(options.device)


def check_attention(attention: str, options: TranslationOptions) -> None:
    """Raise ValueError where an attention cannot stand in all places of the model.

    A small one takes a step; then what it gives for a prefix may depend neither on padding nor on what
    follows.
    """
    small = replace(options, hidden_dim=16, num_layers=1, device="cpu")
    tokens = torch.arange(3, 11).view(1, 8)
    try:
        model = build(attention, 11, small)
        model(tokens, tokens[:, :5]).sum().backward()
        with torch.no_grad():
            model.eval()
            expected, found = model(tokens, tokens[:, :5]), model(nn.functional.pad(tokens, (0, 2)), tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"attention {attention!r} cannot translate: {error}") from error
    if not torch.allclose(found[:, :5], expected, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"attention {attention!r} cannot translate: what it gives depends on padding or on later tokens"
        )


def train(
    attention: str, encoded: Encoded, options: TranslationOptions, on_progress: Progress
) -> list[EpochRow]:
    """Train with one attention; the epoch of the lowest validation loss is tested.

    Raises:
        FloatingPointError: if a loss is NaN or infinite.
    """
    model = build(attention, len(encoded.subwords), options)
    trainer = Trainer(model, encoded.train, options)
    rows: list[EpochRow] = []
    best: dict[str, Tensor] = {}
    lowest, tested = math.inf, 0
    for epoch in range(1, options.epochs + 1):
        name = f"epoch {epoch}/{options.epochs}"
        started = time.perf_counter()
        train_loss = trainer.run_epoch(partial(on_progress, f"{name}, training"))
        seconds = time.perf_counter() - started
        on_progress(f"{name}, translating", trainer.num_steps)
        loss = evaluate(model, encoded.validation, options)
        if not math.isfinite(train_loss + loss):
            raise FloatingPointError(
                f"the loss of {attention} is {train_loss} in training and {loss} in validation in epoch "
                f"{epoch}; try a smaller --learning-rate"
            )
        if loss < lowest:
            best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            lowest, tested = loss, len(rows)
        row = EpochRow(
            attention=attention,
            seed=options.seed,
            epoch=epoch,
            train_loss=train_loss,
            validation_loss=loss,
            perplexity=math.exp(min(loss, _LARGEST_LOSS)),
            validation_bleu=score(model, encoded, options, "validation"),
            seconds=seconds,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        )
        rows.append(row)
    on_progress("testing", trainer.num_steps)
    model.load_state_dict(best)
    rows[tested] = replace(
        rows[tested],
        test_bleu_greedy=score(model, encoded, options, "test"),
        test_bleu_beam=score(model, encoded, options, "test", beam=True),
    )
    return rows


class Trainer:
    """A model, its optimizer, and how far they are."""

    def __init__(self, model: Translator, pairs: Pairs, options: TranslationOptions) -> None:
        self.model, self.pairs, self.options = model, pairs, options
        self.num_steps = 0
        self.generator = torch.Generator().manual_seed(options.seed)
        fused = torch.device(options.device).type == "cuda"
        self.optimizer = torch.optim.Adam(
            model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=fused
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            options.learning_rate,
            total_steps=total_steps(pairs, options),
            pct_start=options.warmup,
            cycle_momentum=False,
        )

    def run_epoch(self, on_step: Callable[[int], Any]) -> float:
        """See every pair once; the mean loss of a token, without label smoothing."""
        self.model.train()
        # Added up on the device: a step does not wait for its loss.
        total = torch.zeros((), device=self.options.device)
        count = torch.zeros((), device=self.options.device)
        for batch in self.pairs.batches(self.options.batch_tokens, self.generator):
            self.optimizer.zero_grad(set_to_none=True)
            loss, smoothed, tokens = losses(self.model, batch, self.options)
            (smoothed / tokens).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
            self.optimizer.step()
            self.schedule.step()
            total += loss.detach()
            count += tokens
            self.num_steps += 1
            if self.num_steps % _REPORT_EVERY == 0:
                on_step(self.num_steps)
        return (total / count).item()


def total_steps(pairs: Pairs, options: TranslationOptions) -> int:
    """Of all epochs."""
    return options.epochs * pairs.num_batches(options.batch_tokens)


def losses(model: Translator, batch: Batch, options: TranslationOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Over the real tokens of a batch: ``Σ −log p``, the same with label smoothing, and their number."""
    following = batch.target[:, 1:]
    with precision(options.device):
        logits = model(batch.source, batch.target[:, :-1])
    surprise = -logits.float().log_softmax(-1)  # (B, m, V)
    real = following != PAD
    plain = surprise.gather(-1, following[..., None]).squeeze(-1)
    share = options.label_smoothing
    smoothed = (1 - share) * plain + share * surprise.mean(-1)
    return (plain * real).sum(), (smoothed * real).sum(), real.sum()


@torch.no_grad()
def evaluate(model: Translator, pairs: Pairs, options: TranslationOptions) -> float:
    """The mean loss of a token, without dropout and label smoothing."""
    model.eval()
    parts = [losses(model, batch, options) for batch in pairs.batches(options.batch_tokens)]
    loss, tokens = (torch.stack([part[index] for part in parts]).sum() for index in (0, 2))
    return (loss / tokens).item()


def score(
    model: Translator, encoded: Encoded, options: TranslationOptions, split: str, *, beam: bool = False
) -> float:
    """The BLEU of translations of ``"validation"`` or ``"test"``, by greedy search or by beam search."""
    model.eval()
    search = beams(options.beam_size, options.length_penalty) if beam else greedy
    pairs: Pairs = getattr(encoded, split)
    with precision(options.device):
        texts = translate(model, encoded.subwords, pairs, options.max_length, search=search)
    return bleu(texts, getattr(encoded, f"{split}_references"))


def precision(device: str) -> AbstractContextManager[Any]:
    """bfloat16 on CUDA, float32 elsewhere."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
