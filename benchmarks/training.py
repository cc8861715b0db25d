"""What the training engine adds to the model's own time, on a CPU: ``python benchmarks/training.py``.

One step of the Long Range Arena model on sequences of 512. Writes benchmarks/results/training-cpu.json. What
a step takes on a GPU is measured by ``schoenbat lra sweep --timing``.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from schoenbat.data.task import Split, Task
from schoenbat.report.results import write_results
from schoenbat.training.batches import DeviceSplit
from schoenbat.training.protocol import Protocol
from schoenbat.training.run import Run, RunOptions

ATTENTIONS = ("softmax", "softmax:naive=true", "schoenbat", "schoenbat:construction=exact-low")
TASK, CLASSES = "listops", 10
LENGTH, STEPS = 512, 12
PATH = Path(__file__).parent / "results" / "training-cpu.json"


@dataclass(frozen=True)
class StepRow:
    """What one training step costs, and what of it is the model's own."""

    task: str
    attention: str
    length: int
    batch_size: int
    seconds: float
    model_seconds: float


def random_task(count: int = 256) -> Task:
    """Tokens without meaning, and no padding: a step's time does not depend on what they say."""
    rng = np.random.default_rng(0)
    vocabulary = Protocol.paper(TASK).embedding_rows
    tokens = rng.integers(1, vocabulary, (count, LENGTH)).astype(np.uint8)
    labels = rng.integers(0, CLASSES, count)
    split = Split(tokens, np.full(count, LENGTH), np.arange(count), labels)
    return Task(TASK, vocabulary, CLASSES, LENGTH, False, split, split, split, "random tokens")


def measure() -> Iterator[StepRow]:
    """The engine's steps and the model's own in turns, so that both meet the same moods of the machine."""
    for attention in ATTENTIONS:
        options = RunOptions(TASK, attention, Protocol.paper(TASK), accelerator="cpu")
        with tempfile.TemporaryDirectory() as directory:
            run = Run(Fabric(accelerator="cpu"), random_task(), options, Path(directory))
            own = model_step(run)
            pairs = [(seconds(partial(engine_step, run)), seconds(own)) for _ in range(STEPS)][2:]
        engine, model = (median(times) for times in zip(*pairs, strict=True))
        yield StepRow(TASK, attention, LENGTH, options.protocol.batch_size, engine, model)


def engine_step(run: Run) -> None:
    run.advance(run.step + 1, timed=True)
    run.training_step.tally()


def model_step(run: Run) -> Callable[[], None]:
    """Forward, backward, clipping and update on a batch that is ready: what no loop can do without."""
    batch = DeviceSplit(run.task.train, "cpu").batch(torch.arange(run.protocol.batch_size))
    optimizer = torch.optim.AdamW(run.module.parameters(), lr=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(run.module(batch.tokens, batch.mask), batch.labels).backward()
        nn.utils.clip_grad_value_(run.module.parameters(), run.protocol.clip_value)
        optimizer.step()

    return step


def seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def table(rows: list[StepRow]) -> Table:
    shown = Table("task", "attention", "n", "batch", "ms a step", "model's own ms")
    for row in rows:
        shown.add_row(
            row.task,
            row.attention,
            f"{row.length:,}",
            str(row.batch_size),
            f"{row.seconds * 1e3:,.2f}",
            f"{row.model_seconds * 1e3:,.2f}",
        )
    return shown


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = list(track(measure(), "measuring", total=len(ATTENTIONS), auto_refresh=False))
    write_results(PATH, "training", {"attentions": ATTENTIONS}, rows, device=torch.device("cpu"))
    Console(width=100).print(table(rows))
