"""Checkpoints: a file holds a whole state or the one before it, whenever the program ends."""

import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from schoenbat.training.record import flattened


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be continued from."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors in plain containers) to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote, onto the CPU."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, OSError, KeyError, pickle.UnpicklingError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({why}); delete it to train from the beginning"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"checkpoint {path} holds a {type(state).__name__}, not a run's state; delete it to train from "
            "the beginning"
        )
    return state


def refuse_other_options(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise where a run was made with other options than those now asked for."""
    there, here = flattened(saved), flattened(wanted)
    differences = [
        f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
        for name in dict.fromkeys([*there, *here])
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"{path} was made with other options ({'; '.join(differences)}); use the same ones, "
            "or another --out, or delete it"
        )


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later steps do not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def random_states(fabric: Fabric) -> Tensor:
    """The state of what dropout draws from, one row of bytes for each device."""
    states = [torch.get_rng_state()]
    if fabric.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(fabric.device))
    own = torch.cat(states).to(fabric.device)
    rows = [own]
    if fabric.world_size > 1:
        rows = [torch.empty_like(own) for _ in range(fabric.world_size)]
        torch.distributed.all_gather(rows, own)
    return torch.stack(rows).cpu()


def set_random_state(fabric: Fabric, states: Tensor) -> None:
    """Draw on as at the time of `random_states`."""
    own = states[fabric.global_rank]
    size = torch.get_rng_state().numel()
    torch.set_rng_state(own[:size])
    if fabric.device.type == "cuda":
        torch.cuda.set_rng_state(own[size:], fabric.device)
