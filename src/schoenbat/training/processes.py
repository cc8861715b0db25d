"""The processes that share a run: how many there are, who started them, and what each holds of the model."""

import os
import re
from inspect import signature
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

STRATEGIES = ("auto", "ddp", "fsdp")


def make_fabric(accelerator: str, devices: int, strategy: str, precision: str) -> Fabric:
    """Devices, precision and what they share; under torchrun as many devices and machines as it says.

    Of one process there is nothing to share, whatever the strategy. ``"auto"`` is ``"ddp"`` for several.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}; got {strategy!r}")
    machines = 1
    if torch.distributed.is_torchelastic_launched():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        machines = int(os.environ["WORLD_SIZE"]) // devices
    chosen: Any = "auto"
    if strategy == "fsdp" and devices * machines > 1:
        chosen = ModelParallelStrategy(_shard, data_parallel_size=devices * machines, tensor_parallel_size=1)
    elif devices * machines > 1:
        # Maps are drawn alike everywhere, and statistics are synchronised: no buffer has to be sent.
        known = signature(nn.parallel.DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: Any = {name: False}
        chosen = DDPStrategy(**options)
    given: Any = {"precision": precision}
    return Fabric(accelerator=accelerator, devices=devices, num_nodes=machines, strategy=chosen, **given)


def launch(fabric: Fabric) -> None:
    """Start the processes of a run, or join those that torchrun has started."""
    if is_restart():
        # torchrun keeps its store when it starts processes again, with the addresses of those that are gone
        # in it (seen with torch 2.13: a process that reads one of them waits for good).
        store, rank, size = next(torch.distributed.rendezvous("env://"))
        store = torch.distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        backend = "nccl" if fabric.device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    fabric.launch()


def num_processes(devices: int) -> int:
    """How many processes share a run for which ``devices`` were asked for."""
    return int(os.environ["WORLD_SIZE"]) if torch.distributed.is_torchelastic_launched() else devices


def share_of_batch(batch_size: int, processes: int) -> int:
    """How many examples of a batch each process has.

    >>> share_of_batch(32, 4)
    8
    """
    if batch_size % processes:
        raise ValueError(f"a batch of {batch_size} cannot be split over {processes} devices evenly")
    return batch_size // processes


def is_restart() -> bool:
    """Whether torchrun has started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def is_first() -> bool:
    """Whether this is the process that speaks for all of them."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def exit_code(code: int) -> int:
    """What this process ends with where all of them end a run with ``code``.

    Those that Fabric has started end with 0: it kills the first one, whose code is the run's, where another
    ends otherwise.
    """
    return code if is_first() or torch.distributed.is_torchelastic_launched() else 0


class LostProcessError(RuntimeError):
    """Another process of the run has ended or cannot be reached."""

    def __init__(self, reason: BaseException, saved: int) -> None:
        # Without the place in gloo's source before it, and the advice for programmers after it.
        why = re.sub(r"^\[[^]]*\] *", "", str(reason)).split(". ")[0]
        kept = f"What was done up to step {saved} is saved" if saved else "Nothing was saved yet"
        super().__init__(
            f"another process of this run has ended or cannot be reached ({why}). {kept}: run the same "
            "command again with --resume, or let torchrun do so by --max-restarts"
        )


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error means that a message to or from another process did not arrive."""
    if isinstance(error, torch.distributed.DistError):
        return True
    # Torch's own errors are plain; ours, which may quote any path, are subclasses.
    return type(error) is RuntimeError and any(name in str(error) for name in ("gloo", "NCCL", "peer"))


def is_sharded(fabric: Fabric) -> bool:
    """Whether each process holds only a part of weights and optimizer."""
    return isinstance(fabric.strategy, ModelParallelStrategy)


def _shard(model: Any, mesh: Any) -> nn.Module:
    """FSDP2: weights are put together layer by layer, as they are needed."""
    from torch.distributed.fsdp import fully_shard

    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread(whole: Any, like: Any) -> Any:
    """Of whole tensors in dictionaries, this process's part where its tensor in ``like`` is one."""
    if isinstance(whole, dict):
        return {name: spread(value, like[name]) for name, value in whole.items()}
    if isinstance(like, DTensor):
        # Every process has the whole: nothing needs to be sent.
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return whole


def any_process(fabric: Fabric, flag: bool) -> bool:
    """Whether the flag is up on any process; all of them ask at the same step."""
    if fabric.world_size == 1:
        return flag
    raised = torch.tensor(float(flag), device=fabric.device)
    torch.distributed.all_reduce(raised)
    return bool(raised.item())
