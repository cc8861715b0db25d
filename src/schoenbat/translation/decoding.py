"""Translations from a trained model: the likeliest next token again and again, or beam search.

The source is encoded once; the decoder runs over the whole prefix for each new token. Sentences are short,
and so every attention can be used, whether or not it has a state.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from schoenbat.translation.batches import Pairs
from schoenbat.translation.model import Translator
from schoenbat.translation.tokenizer import BEGIN, END, PAD, Subwords

MORE_THAN_SOURCE = 16
"""By how many tokens a translation may be longer than the longest source beside it."""
Search = Callable[[Translator, Tensor, int], Tensor]
"""From a model, sources ``(B, n)`` and a limit m: translations ``(B, up to m)``, without begin."""


@torch.no_grad()
def greedy(model: Translator, source: Tensor, max_length: int) -> Tensor:
    """The likeliest token after each prefix, until the end: ``(B, m)``, padded behind it.

    Args:
        model: in eval mode.
        source: ``(B, n)``.
        max_length: how many tokens a translation has at most, its end included.
    """
    mask = source != PAD
    memory = model.encode(source, mask)
    prefix = source.new_full((len(source), 1), BEGIN)
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for _ in range(max_length):
        token = _next_token(model, prefix, memory, mask).argmax(-1).masked_fill(ended, PAD)
        prefix = torch.cat([prefix, token[:, None]], -1)
        ended |= token == END
        if ended.all():
            break
    return prefix[:, 1:]


@torch.no_grad()
def beam_search(
    model: Translator, source: Tensor, max_length: int, *, beam_size: int = 5, length_penalty: float = 1.0
) -> Tensor:
    """The best translation found, by ``Σ log p / length ** length_penalty``: ``(B, m)``, padded behind it.

    The best ``beam_size`` prefixes go on; a translation that has ended keeps its place among them while it is
    good enough. With one place it is `greedy`.

    Args:
        model: in eval mode.
        source: ``(B, n)``.
        max_length: how many tokens a translation has at most, its end included.
        beam_size: how many prefixes are kept.
        length_penalty: 0 compares probabilities, which favours short translations; 1 compares their mean
            over tokens.
    """
    batch, device = len(source), source.device
    mask = source != PAD
    memory = model.encode(source, mask).repeat_interleave(beam_size, 0)
    mask = mask.repeat_interleave(beam_size, 0)
    prefix = torch.full((batch, beam_size, 1), BEGIN, device=device)
    # All places begin with the same prefix: only the first may go on.
    total = torch.full((batch, beam_size), -torch.inf, device=device)
    total[:, 0] = 0.0
    length = torch.zeros(batch, beam_size, device=device)
    ended = torch.zeros(batch, beam_size, dtype=torch.bool, device=device)
    for _ in range(max_length):
        following = _next_token(model, prefix.flatten(0, 1), memory, mask).unflatten(0, (batch, beam_size))
        # What has ended goes on in one way, by padding, which costs nothing.
        following = following.masked_fill(ended[..., None], -torch.inf)
        following[..., PAD] = following[..., PAD].masked_fill(ended, 0.0)
        totals = total[..., None] + following  # (B, beams, V)
        lengths = (length + ~ended)[..., None].expand_as(totals)
        best = (totals / lengths**length_penalty).flatten(1).topk(beam_size).indices
        beam, token = best // totals.shape[-1], best % totals.shape[-1]
        total, length = (x.flatten(1).gather(1, best) for x in (totals, lengths))
        prefix = torch.cat([prefix.gather(1, beam[..., None].expand_as(prefix)), token[..., None]], -1)
        ended = ended.gather(1, beam) | (token == END)
        if ended.all():
            break
    best = (total / length**length_penalty).argmax(1)
    return prefix[torch.arange(batch, device=device), best, 1:]


def translate(
    model: Translator,
    subwords: Subwords,
    pairs: Pairs,
    max_length: int,
    *,
    search: Search = greedy,
    count: int = 512,
) -> list[str]:
    """The translations of all sources, in their order; ``count`` sentences of similar length at a time."""
    translations = [""] * len(pairs)
    for batch in pairs.by_length(count):
        limit = min(max_length, batch.source.shape[1] + MORE_THAN_SOURCE)
        found = search(model, batch.source, limit).tolist()
        for row, text in zip(batch.rows.tolist(), subwords.decode(found), strict=True):
            translations[row] = text
    return translations


def beams(beam_size: int, length_penalty: float) -> Search:
    """`beam_search` with its options chosen."""
    return partial(beam_search, beam_size=beam_size, length_penalty=length_penalty)


def _next_token(model: Translator, prefix: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities ``(B, V)`` of what follows each prefix; never padding or a second begin."""
    logits = model.logits(model.decode(prefix, memory, mask)[:, -1]).float()
    for token in (PAD, BEGIN):
        logits[:, token] = -torch.inf
    return logits.log_softmax(-1)
