"""Two processes train as one: the same losses, the same end after a stop, checkpoints for any number of them.

The processes are started once, as torchrun does it, and run every case; the test compares what they wrote.
"""

import multiprocessing
import os
import shutil
import signal
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.multiprocessing as processes
from training.tiny import tiny_options, tiny_task

from schoenbat.training import checkpoint, shards
from schoenbat.training.classifier import build_model
from schoenbat.training.failure import NonFiniteError
from schoenbat.training.interruption import Interrupted
from schoenbat.training.log import read_log
from schoenbat.training.record import LOG, find_checkpoint
from schoenbat.training.run import Run, train

PROCESSES = 2
STRATEGIES = ["ddp", "fsdp"]
STOP_AT, STOPPED_AT = 9, 10  # between two reports


def options(**changes):
    """Without dropout the batch is all that counts, not how it is split.

    The learning rate is small: rounding then stays small for as many steps.
    """
    settings = {"steps": 20, "warmup": 5, "evaluate_every": 20, "learning_rate": 2e-4, "dropout": 0.0}
    attention = "schoenbat:num_features=16,trainable_features=true,normalization=batch"
    return tiny_options(attention, **settings | {"report_every": 4, "checkpoint_seconds": 1e9} | changes)


def stop(directory, **changes):
    """Train until SIGTERM reaches the first process; what is said then."""

    def ask(progress):
        if progress.step == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as stopped:
        train(tiny_task(), options(**changes), directory, on_progress=ask)
    return str(stopped.value)


def work(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    world = {"WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES, "RANK": rank, "LOCAL_RANK": rank}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {name: str(value) for name, value in {**world, **address}.items()}
    path = Path(folder)
    found = {}
    for strategy in STRATEGIES:
        found[strategy, "record"] = train(tiny_task(), options(strategy=strategy), path / strategy)
        with_dropout = options(strategy=strategy, dropout=0.1)
        train(tiny_task(), with_dropout, path / f"{strategy}-whole")
        found[strategy, "stopped"] = stop(path / f"{strategy}-parts", strategy=strategy, dropout=0.1)
        torch.manual_seed(99)  # whatever happens in between
        train(tiny_task(), with_dropout, path / f"{strategy}-parts", resume=True)
        train(tiny_task(), options(strategy=strategy), path / f"one-{strategy}", resume=True)
        stop(path / f"{strategy}-one", strategy=strategy)
        other = STRATEGIES[1 - STRATEGIES.index(strategy)]
        stop(path / f"{strategy}-{other}", strategy=strategy)
        train(tiny_task(), options(strategy=other), path / f"{strategy}-{other}", resume=True)
        found[strategy, "failure"] = failure(path / f"{strategy}-failure", rank, strategy)
    found["buffers"] = buffers(path / "buffers")
    torch.save(found, path / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def failure(directory, rank, strategy):
    """What all processes say of a NaN that only the second one meets."""
    set_up = Run._set_up

    def spoiled(self):
        set_up(self)
        calls = iter(range(1000))
        self.module.layers[1].output.register_forward_hook(
            lambda module, inputs, output: output * float("nan") if rank == 1 and next(calls) >= 3 else None
        )

    with mock.patch.object(Run, "_set_up", spoiled), pytest.raises(NonFiniteError) as error:
        train(tiny_task(), options(strategy=strategy), directory)
    return error.value.step, error.value.layer


def buffers(directory):
    """Maps and running averages at the end of a run on this process."""
    seen = {}
    record = Run.record

    def look(self):
        seen.update({name: buffer.clone() for name, buffer in self.module.named_buffers()})
        return record(self)

    with mock.patch.object(Run, "record", look):
        train(tiny_task(), options(strategy="ddp"), directory)
    return seen


def weights(directory):
    path = find_checkpoint(directory)
    if not path.is_dir():
        return checkpoint.load(path)["model"]
    torch.manual_seed(0)
    return shards.load(path, {"model": build_model(tiny_task(), options()).state_dict()})["model"]


def assert_same_end(first, second):
    expected = weights(second)
    for name, tensor in weights(first).items():
        assert tensor.equal(expected[name]), name
    assert read_log(first / LOG) == read_log(second / LOG)


def assert_close_end(first, second):
    """Equal but for the rounding of sums over parts of a batch, which training carries on.

    Batch statistics take the biases of queries and keys out again: their gradients are rounding alone, of
    which Adam makes steps, 4e-3 in all at most.
    """
    expected = weights(second)
    for name, tensor in weights(first).items():
        atol = 1e-4 if name.endswith(("query_key_value.bias", "running_mean")) else 1e-5
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=atol, msg=name)
    for a, b in zip(read_log(first / LOG), read_log(second / LOG), strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def check_ends(folder):
    """Two processes train as one does; those that share weights, to the bit as those that do not."""
    assert_close_end(folder / "ddp", folder / "one")
    assert_same_end(folder / "fsdp", folder / "ddp")


def check_records(found):
    for strategy in STRATEGIES:
        assert found[0][strategy, "record"].devices == PROCESSES
        assert found[1][strategy, "record"] is None


def check_stopped(folder, found):
    """The signal reaches one process; all agree, save, and go on to the same bits, dropout included."""
    for strategy in STRATEGIES:
        assert [f[strategy, "stopped"] for f in found] == [f"stopped after step {STOPPED_AT}"] * PROCESSES
        assert_same_end(folder / f"{strategy}-whole", folder / f"{strategy}-parts")


def check_other_numbers(folder):
    """One process continues what two began, and two what one began, or two by the other strategy."""
    for strategy in STRATEGIES:
        train(tiny_task(), options(), folder / f"{strategy}-one", resume=True)
    for name in ("ddp-one", "fsdp-one", "one-ddp", "one-fsdp", "ddp-fsdp", "fsdp-ddp"):
        assert_close_end(folder / name, folder / "one")


def check_files(folder):
    """Only fsdp writes a directory, and a checkpoint takes the place of all others."""
    for name in ("ddp", "fsdp", "ddp-fsdp", "fsdp-ddp", "one-fsdp"):
        (path,) = (folder / name).glob("checkpoint*")
        assert path.is_dir() == name.endswith("fsdp")
    files = {file.name for file in find_checkpoint(folder / "fsdp").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp", "run.pt"}


def check_failures(found):
    for rank in range(PROCESSES):
        for strategy in STRATEGIES:
            assert found[rank][strategy, "failure"] == (4, "layers.1.output (Linear), forward")


def check_buffers(found):
    first, second = (f["buffers"] for f in found)
    assert any("running_mean" in name for name in first)
    assert any("features" in name for name in first)
    for name, buffer in first.items():
        assert buffer.equal(second[name]), name


def test_two_processes(tmp_path):
    train(tiny_task(), options(), tmp_path / "one")
    stop(tmp_path / "one-half")
    for strategy in STRATEGIES:
        shutil.copytree(tmp_path / "one-half", tmp_path / f"one-{strategy}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(["schoenbat", "lightning.fabric", "torch.utils.tensorboard"])
    processes.start_processes(work, (str(tmp_path), port), nprocs=PROCESSES, start_method="forkserver")
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]
    check_ends(tmp_path)
    check_records(found)
    check_stopped(tmp_path, found)
    check_other_numbers(tmp_path)
    check_files(tmp_path)
    check_failures(found)
    check_buffers(found)
