"""What a sequence split over processes sends, and how long a layer takes: ``python benchmarks/parallel.py``.

CPU processes of one thread each, connected by gloo; float32, one sequence, one head, d = 64, D = 128,
exact-low; forward and backward. Bytes are those of the tensors that a process hands to collectives. One
process is the plain call. Beside the time on the clock, which means something only where every process has a
core to itself, stands the processor time of the busiest one. Writes benchmarks/results/parallel.json.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import schoenbat.parallel
from schoenbat import MaclaurinFeatures
from schoenbat.report.results import write_results

RESULTS = Path(__file__).parent / "results" / "parallel.json"


@dataclass(frozen=True)
class ParallelOptions:
    """What is measured."""

    processes: tuple[int, ...] = (1, 2, 4)
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    num_features: int = 128
    head_dim: int = 64
    num_heads: int = 1
    construction: str = "exact-low"
    repetitions: int = 3
    cores: int | None = os.cpu_count()
    seed: int = 0


@dataclass(frozen=True)
class ParallelRow:
    """One layer, forward and backward."""

    processes: int
    is_causal: bool
    length: int
    """Of the whole sequence."""
    sent: int
    """Bytes that each process hands to collectives."""
    keys_and_values: int
    """Bytes of one shard's keys and values: what would be sent if they were, once, without gradients."""
    seconds: float
    """On the clock: the median; each repetition ends when the slowest process does."""
    processor_seconds: float
    """Of the busiest process, a repetition on average."""


OPTIONS = ParallelOptions()


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """The sizes of the tensors that this process hands to collectives."""
    sizes: list[int] = []

    def counted(collective: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sizes.append(args[position].nbytes)
            return collective(*args, **kwargs)

        return call

    with (
        mock.patch.object(dist, "all_reduce", counted(dist.all_reduce, 0)),
        mock.patch.object(dist, "all_gather", counted(dist.all_gather, 1)),
    ):
        yield sizes


def shards(length: int, count: int, rank: int) -> list[Tensor]:
    """This rank's query, key and value."""
    generator = torch.Generator().manual_seed(OPTIONS.seed + rank)
    shape = 1, OPTIONS.num_heads, length // count, OPTIONS.head_dim
    rows = (torch.randn(shape, generator=generator) for _ in range(3))
    return [torch.nn.functional.normalize(x, dim=-1).requires_grad_() for x in rows]


def measure(rank: int, count: int, folder: str) -> None:
    """One process of `count`: all lengths, both directions of attention; the first writes the rows."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store-{count}"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    group = dist.group.WORLD
    assert group is not None
    features = MaclaurinFeatures(
        OPTIONS.head_dim, OPTIONS.num_features, construction=OPTIONS.construction, seed=OPTIONS.seed
    )

    def layer(inputs: list[Tensor], is_causal: bool) -> float:
        dist.barrier()
        started = time.perf_counter()
        out = schoenbat.parallel.rmfa(*inputs, features, group=group, is_causal=is_causal)
        torch.autograd.grad(out.sum(), inputs)
        dist.barrier()
        return time.perf_counter() - started

    rows = []
    for is_causal in (False, True):
        layer(shards(min(OPTIONS.lengths), count, rank), is_causal)  # what is loaded by a first call
        for length in OPTIONS.lengths:
            inputs = shards(length, count, rank)
            started = time.process_time()
            with bytes_sent() as sizes:
                seconds = [layer(inputs, is_causal) for _ in range(OPTIONS.repetitions)]
            busy = torch.tensor((time.process_time() - started) / OPTIONS.repetitions)
            dist.all_reduce(busy, dist.ReduceOp.MAX)
            row = ParallelRow(
                count,
                is_causal,
                length,
                sent=sum(sizes) // OPTIONS.repetitions,
                keys_and_values=inputs[1].nbytes + inputs[2].nbytes,
                seconds=median(seconds),
                processor_seconds=busy.item(),
            )
            rows.append(row)
    if rank == 0:
        torch.save([vars(row) for row in rows], os.path.join(folder, f"{count}.pt"))
    dist.destroy_process_group()


def run() -> Iterator[list[ParallelRow]]:
    """The rows for each number of processes."""
    multiprocessing.set_forkserver_preload(["schoenbat", "torch._dynamo"])
    for count in OPTIONS.processes:
        with tempfile.TemporaryDirectory() as folder:
            processes.start_processes(measure, (count, folder), nprocs=count, start_method="forkserver")
            yield [ParallelRow(**row) for row in torch.load(Path(folder) / f"{count}.pt")]


def table(rows: list[ParallelRow]) -> Table:
    """Bytes and times; by how much the busiest process has less to do than one process alone."""
    found = {(row.processes, row.is_causal, row.length): row for row in rows}
    shown = Table(title="forward and backward of one layer")
    for heading in ("processes", "attention", "n", "KiB sent", "KiB of k, v", "ms", "CPU ms", "less by"):
        shown.add_column(heading, justify="left" if heading == "attention" else "right")
    for row in rows:
        alone = found[1, row.is_causal, row.length].processor_seconds
        shown.add_row(
            str(row.processes),
            "causal" if row.is_causal else "bidirectional",
            f"{row.length:,}",
            f"{row.sent / 1024:,.1f}",
            f"{row.keys_and_values / 1024:,.0f}",
            f"{1000 * row.seconds:,.0f}",
            f"{1000 * row.processor_seconds:,.0f}",
            f"{alone / row.processor_seconds:.1f} ×",
        )
    return shown


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)  # as the processes do: the results name it
    parts = track(run(), "measuring", total=len(OPTIONS.processes), auto_refresh=False)
    measured = [row for part in parts for row in part]
    write_results(RESULTS, "parallel", OPTIONS, measured)
    Console(width=100).print(table(measured))
