"""A task that a two-layer model learns in seconds, and options to train on it."""

import itertools

import numpy as np

from schoenbat.data.task import Split, Task
from schoenbat.training.options import RunOptions
from schoenbat.training.protocol import Protocol


def tiny_task(*, paired=False, length=12, seed=0, sizes=(96, 40, 40)):
    """The label is the remainder of the first token by 3; of pairs, whether the first one's is larger."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    tokens = rng.integers(1, 8, (count, length), dtype=np.uint8)
    lengths = rng.integers(4, length + 1, count)
    tokens[np.arange(length) >= lengths[:, None]] = 0
    members = rng.integers(0, count, (count, 2)) if paired else np.arange(count)
    first = tokens[members][..., 0]
    labels = (first[:, 0] > first[:, 1] if paired else first % 3).astype(np.int64)
    ends = np.cumsum((0, *sizes))
    splits = [
        Split(tokens, lengths, members[start:end], labels[start:end])
        for start, end in itertools.pairwise(ends)
    ]
    return Task("tiny", 8, 2 if paired else 3, length, paired, *splits, fingerprint=f"tiny {seed} {paired}")


def tiny_options(attention="schoenbat:num_features=16", **changes):
    settings = {"steps": 60, "warmup": 10, "evaluate_every": 20, "learning_rate": 5e-3}
    settings |= {name: changes.pop(name) for name in list(changes) if name in Protocol.__dataclass_fields__}
    protocol = Protocol(batch_size=16, embedding_rows=8, **settings)
    defaults = {"accelerator": "cpu", "report_every": 10}
    return RunOptions("tiny", attention, protocol, **defaults | changes)
