"""How the error grows with the logit scale: the curves of docs/choosing.md.

Q, K and V are standard normal, d = 64, the tokens of Q and K are normalised as by pre-SBN, so that a logit is
the scale times a cosine. Writes docs/figures/sharpness.json in about a minute.

    python docs/sharpness.py
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track

from schoenbat import MaclaurinFeatures, PreSBN, kernelized_attention, rmfa
from schoenbat.report.results import write_results

OUT = Path(__file__).parent / "figures" / "sharpness.json"


@dataclass(frozen=True)
class SharpnessOptions:
    """What is compared."""

    constructions: tuple[str, ...] = ("paper", "unbiased", "exact-low")
    scales: tuple[float, ...] = (0.125, 1.0, 2.0, 4.0, 8.0, 16.0)
    num_features: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    head_dim: int = 64
    num_tokens: int = 256
    repetitions: int = 40
    seed: int = 0


@dataclass(frozen=True)
class SharpnessRow:
    """One point of the figure."""

    scale: float
    construction: str
    num_features: int
    relative: float
    """Mean absolute error as a share of plain averaging's: above 1 is worse than no attention at all."""
    largest_weight: float
    """Of a query's softmax weights, the mean over the queries."""


def run(options: SharpnessOptions) -> Iterator[SharpnessRow]:
    """Every combination, each repetition with inputs and a map of its own."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = 3, options.repetitions, options.num_tokens, options.head_dim
    query, key, value = torch.randn(shape, generator=generator).unbind()
    query, key = PreSBN("token")(query), PreSBN("token")(key)
    for scale in options.scales:
        exact = kernelized_attention(query, key, value, scale=scale)
        averaging = (exact - value.mean(-2, keepdim=True)).abs().mean()
        largest = (scale * query @ key.mT).softmax(-1).amax(-1).mean().item()
        for construction, num_features in itertools.product(options.constructions, options.num_features):
            outputs = []
            for repetition in range(options.repetitions):
                features = MaclaurinFeatures(
                    options.head_dim,
                    num_features,
                    construction=construction,
                    scale=scale,
                    seed=options.seed + repetition,
                )
                rows = (x[repetition, None] for x in (query, key, value))
                outputs.append(rmfa(*rows, features))
            error = (torch.cat(outputs) - exact).abs().mean()
            yield SharpnessRow(scale, construction, num_features, (error / averaging).item(), largest)


def main() -> None:
    options = SharpnessOptions()
    total = len(options.scales) * len(options.constructions) * len(options.num_features)
    rows = list(track(run(options), "error by scale", total))
    write_results(OUT, "sharpness", options, rows)


if __name__ == "__main__":
    main()
