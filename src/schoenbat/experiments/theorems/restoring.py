"""Does post-SBN, γ · att^β, give back the attention that pre-SBN took away?

The paper's theorem says RMFA(Q_SBN, K_SBN, V) ≈ (1/t) [(1/s) ⊙ RMFA(Q, K, V)]^(1/r), so that γ = s tʳ and
β = r restore it. Its proof takes a power of a sum over the keys for the sum of the powers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schoenbat.experiments.theorems.estimates import Inputs, draw_inputs, rms
from schoenbat.functional import kernelized_attention
from schoenbat.normalization import PreSBN

UNCHANGED, FACTOR, POWER, SCALE = METHODS = "γ = β = 1", "best γ", "best γ and β", "logit scale √d"
VALUES = ("signed", "positive")


@dataclass(frozen=True)
class FormulaRow:
    """The theorem where all its symbols have one value: V = 1, every row of norm √d, and means of 0, as rows
    come in opposed pairs, so that t = 1.

    The left side is then 1. The right side, with the s of the proof, is (Σ E)^(1/r) / Σ E^(1/r),
    E = exp(⟨q, k⟩/√d), r = d.
    """

    check: str
    head_dim: int
    num_tokens: int
    right_side: float
    """Mean over the queries."""


@dataclass(frozen=True)
class RestoringRow:
    """How far attention (exp, exact) of normalised rows is from that of the rows as they were."""

    check: str
    head_dim: int
    values: str
    method: str
    residual: float
    """Root mean square, as a share of the wanted attention's distance to plain averaging: 1 is averaging."""


def evaluate_formula(head_dim: int, lengths: Sequence[int], seed: int) -> Iterator[FormulaRow]:
    """One row for each number of keys, all of them even."""
    inputs = draw_inputs(seed, max(lengths), head_dim)
    normalize = PreSBN("l2")
    logits = math.sqrt(head_dim) * normalize(inputs.query) @ normalize(inputs.key).mT
    for num_tokens in lengths:
        half = logits[:, : num_tokens // 2]
        # With opposed keys, opposed queries give the same.
        some = torch.cat([half, -half], dim=1)
        logarithm = some.logsumexp(-1) / head_dim - (some / head_dim).logsumexp(-1)
        yield FormulaRow("formula", head_dim, num_tokens, logarithm.exp().mean().item())


def restore(inputs: Inputs) -> Iterator[RestoringRow]:
    """One row for each of `METHODS`, with signed and with positive values; batch statistics, as in the text.

    γ and β are fitted to the very outputs they are judged by, in each channel.
    """
    head_dim = inputs.query.shape[-1]
    normalize = PreSBN("batch", 1, head_dim, dtype=torch.float64)
    query, key = (normalize(x[None, None])[0, 0] for x in (inputs.query, inputs.key))
    for name, value in zip(VALUES, (inputs.value, inputs.value.abs()), strict=True):
        wanted = kernelized_attention(inputs.query, inputs.key, value)
        normalised = kernelized_attention(query, key, value)
        outputs = {
            UNCHANGED: normalised,
            FACTOR: normalised * _best_factor(normalised, wanted),
            POWER: _best_power(normalised, wanted),
            SCALE: kernelized_attention(query, key, value, scale=math.sqrt(head_dim)),
        }
        for method in METHODS:
            residual = rms(outputs[method] - wanted) / rms(wanted - value.mean(0))
            yield RestoringRow("restoring", head_dim, name, method, residual)


def _best_factor(x: Tensor, wanted: Tensor) -> Tensor:
    """γ of each channel by least squares."""
    return (x * wanted).sum(0) / x.square().sum(0)


def _best_power(x: Tensor, wanted: Tensor) -> Tensor:
    """γ · sign(x)|x|^β with the best γ and β of each channel, β among 2,000 from 0.001 to 1,000."""
    best, least = x, torch.full_like(x[0], math.inf)
    size = x.abs() / x.abs().amax(0)  # a large power of it still fits; γ takes what is left out
    for beta in torch.logspace(-3, 3, 2000, dtype=torch.float64).tolist():
        power = x.sign() * size**beta
        fitted = power * _best_factor(power, wanted)
        error = (fitted - wanted).square().sum(0)
        best, least = torch.where(error < least, fitted, best), torch.minimum(error, least)
    return best
