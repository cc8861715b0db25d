"""One training step of the Long Range Arena model on this machine: ``python benchmarks/training.py``.

On a GPU: milliseconds a step with each attention, on sequences of full length, by the engine
as `schoenbat lra train` runs it. On a CPU, where a step takes long: what the engine adds to the model's own
time, on sequences of 512. Writes benchmarks/results/training-<device>.json.
"""

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
from schoenbat.report.results import device_name, write_results
from schoenbat.training.batches import DeviceSplit
from schoenbat.training.protocol import Protocol
from schoenbat.training.run import Run, RunOptions, train

ATTENTIONS = ("softmax", "softmax:naive=true", "schoenbat", "schoenbat:construction=exact-low")
LENGTHS = {"text": 4096, "listops": 2048}
CLASSES = {"text": 2, "listops": 10}
CPU_LENGTH, CPU_STEPS = 512, 12


@dataclass(frozen=True)
class StepRow:
    """What one training step costs; ``model`` is the part that is the model's own, on a CPU."""

    task: str
    attention: str
    length: int
    batch_size: int
    seconds: float
    model_seconds: float | None = None


def random_task(name: str, length: int, count: int = 256) -> Task:
    """Tokens without meaning, and no padding: a step's time does not depend on what they say."""
    rng = np.random.default_rng(0)
    rows = Protocol.paper(name).embedding_rows
    vocabulary = min(256, rows)
    tokens = rng.integers(1, vocabulary, (count, length)).astype(np.uint8)
    labels = rng.integers(0, CLASSES[name], count)
    split = Split(tokens, np.full(count, length), np.arange(count), labels)
    return Task(name, vocabulary, CLASSES[name], length, False, split, split, split, "random tokens")


def gpu_rows() -> Iterator[StepRow]:
    """Every step as a user's run takes it."""
    for name, length in LENGTHS.items():
        for attention in ATTENTIONS:
            options = RunOptions(
                name, attention, Protocol.paper(name), precision="bf16-mixed", compiled=True, timing=True
            )
            with tempfile.TemporaryDirectory() as directory:
                record = train(random_task(name, length), options, Path(directory))
            assert record is not None
            yield StepRow(name, attention, length, options.protocol.batch_size, record.step_seconds)
            torch.cuda.empty_cache()


def cpu_rows() -> Iterator[StepRow]:
    """The engine's steps and the model's own in turns, so that both meet the same moods of the machine."""
    for attention in ATTENTIONS:
        options = RunOptions("listops", attention, Protocol.paper("listops"), accelerator="cpu")
        with tempfile.TemporaryDirectory() as directory:
            run = Run(Fabric(accelerator="cpu"), random_task("listops", CPU_LENGTH), options, Path(directory))
            own = model_step(run)
            pairs = [(seconds(partial(engine_step, run)), seconds(own)) for _ in range(CPU_STEPS)][2:]
        engine, model = (median(times) for times in zip(*pairs, strict=True))
        yield StepRow("listops", attention, CPU_LENGTH, options.protocol.batch_size, engine, model)


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
            "" if row.model_seconds is None else f"{row.model_seconds * 1e3:,.2f}",
        )
    return shown


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    total = len(ATTENTIONS) * (len(LENGTHS) if on_gpu else 1)
    rows = list(track(gpu_rows() if on_gpu else cpu_rows(), "measuring", total=total, auto_refresh=False))
    name = device_name(device).lower().replace(" ", "-") if on_gpu else "cpu"
    path = Path(__file__).parent / "results" / f"training-{name}.json"
    write_results(path, "training", {"attentions": ATTENTIONS}, rows, device=device)
    Console(width=100).print(table(rows))
