"""A sequence split over two processes by fused kernels: in the interpreter, and on a GPU if there is one.

On a GPU both processes share it, and gloo carries CUDA tensors through the host.
"""

import multiprocessing
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from ops.triton.specification import DEVICE, TOLERANCE, relative_error
from oracle import make_map, rows
from test_parallel import WIDTH, Case, in_one_process, messages, on_one_rank, put_together

import schoenbat.parallel
from schoenbat import rmfa

pytest.importorskip("triton")
PROCESSES = 2
SMALL = {"batch": 1, "heads": 2}
SHAPES = [
    Case("uneven shards", (3, 17), **SMALL, kv_heads=1, masked="some", learned_scale=True),
    Case("an empty shard", (0, 5), **SMALL, kv_heads=2, value_dim=3, construction="unbiased", per_head=True),
    Case("half precision", (5, 0), **SMALL, kv_heads=1, learned_scale=True, dtype=torch.float16),
]
LONG = [
    Case("long", (700, 3001), masked="some", learned_scale=True),
    Case("long, a masked shard", (3001, 700), kv_heads=2, masked="shard", dtype=torch.bfloat16),
    Case("long, unbiased", (1500, 1500), construction="unbiased", dtype=torch.bfloat16, learned_scale=True),
]


def fused(case: Case, is_causal: bool) -> Case:
    dtype = torch.float32 if case.dtype == torch.float64 else case.dtype
    options = {"is_causal": is_causal, "implementation": "triton", "enable_gqa": True}
    name = f"{case.name}, {'causal' if is_causal else 'bidirectional'}"
    return replace(case, name=name, dtype=dtype, device=DEVICE, options=options)


def both(shapes: list[Case]) -> list[Case]:
    return [fused(case, is_causal) for case in shapes for is_causal in (False, True)]


def work(rank: int, folder: str, shapes: list[Case]) -> None:
    """Everything that a process does."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), PROCESSES)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, object] = {"auto": automatic(group), "raised": failure(group)}
    for case in both(shapes):
        with messages() as sizes:
            found[case.name] = {**on_one_rank(case, group), "sent": sizes}
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def automatic(group: dist.ProcessGroup) -> list[bool]:
    """Whether "auto" gives what the kernels give, and what the eager functions give."""
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    x = rows(1, 1, 8, 16, seed=group.rank(), dtype=torch.float16).to(DEVICE)
    auto, *others = (
        schoenbat.parallel.rmfa(x, x, x, features, group=group, implementation=name)
        for name in ("auto", "triton", "eager")
    )
    return [torch.equal(auto, other) for other in others]


def failure(group: dist.ProcessGroup) -> str:
    features = make_map("exact-low", device=DEVICE, trainable=True, dtype=torch.float32)
    x = rows(1, 1, 4, 6, dtype=torch.float32).to(DEVICE)
    with pytest.raises(NotImplementedError) as raised:
        schoenbat.parallel.rmfa(x, x, x, features, group=group, implementation="triton")
    return str(raised.value)


def message_sizes(case: Case) -> list[int]:
    """Bytes of the counts, of the sums and of their gradients."""
    monomials = sum(degree > 0 for degree in make_map(case.construction).degrees)
    numbers = monomials * case.value_dim + monomials + WIDTH + case.value_dim
    return [8 * case.batch, *2 * [4 * case.batch * case.kv_heads * numbers]]


def compare(case: Case, ranks: list[dict[str, list[torch.Tensor]]]) -> list[float]:
    """Errors of what ranks found, against the specification on the whole sequence."""
    exact = "reference" if sum(case.lengths) < 100 else "eager"
    found = in_one_process(case, PROCESSES, torch.float64, exact)
    expected = [*found["rows"], *found["copied"]]
    # The scale gets a sum over rows, of about 0.1 each and of either sign.
    sizes = [*[0.3] * len(found["rows"]), *[max(0.3, 0.1 * sum(case.lengths) ** 0.5)] * len(found["copied"])]
    together = zip(put_together(ranks), expected, sizes, strict=True)
    return [relative_error(a, b, size) for a, b, size in together]


def run(folder: Path, shapes: list[Case]) -> list[dict]:
    multiprocessing.set_forkserver_preload(["schoenbat", "torch._dynamo"])
    start = "spawn" if DEVICE == "cuda" else "forkserver"
    processes.start_processes(work, (str(folder), shapes), nprocs=PROCESSES, start_method=start)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def check_cases(ranks: list[dict], shapes: list[Case]) -> None:
    wrong = {}
    for case in both(shapes):
        errors = compare(case, [found[case.name] for found in ranks])
        # Sums of other ranks are rounded once more.
        if not all(error < 1.5 * TOLERANCE[case.dtype] for error in errors):
            wrong[case.name] = errors
        for found in ranks:
            assert sorted(found[case.name]["sent"]) == message_sizes(case)
    assert not wrong, wrong


def test_split_over_two_processes(tmp_path: Path):
    ranks = run(tmp_path, SHAPES)
    check_cases(ranks, SHAPES)
    for found in ranks:
        assert found["auto"] == [DEVICE == "cuda", DEVICE == "cpu"]
        assert "trainable map" in found["raised"]


@pytest.mark.gpu
def test_long_shards_on_a_gpu(tmp_path: Path):
    check_cases(run(tmp_path, LONG), LONG)


def test_a_group_of_one_is_the_plain_call():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    features = make_map("exact-low", 16, 40, dtype=torch.float32, device=DEVICE)
    x = rows(1, 1, 8, 16, dtype=torch.float32).to(DEVICE)
    try:
        out = schoenbat.parallel.rmfa(x, x, x, features, group=dist.group.WORLD, implementation="triton")
    finally:
        dist.destroy_process_group()
    assert torch.equal(out, rmfa(x, x, x, features, implementation="triton"))
