"""Checkpoints: a file holds a whole state or the one before it, whenever the program ends."""

import os
import pickle  # nosec B403 - for the name of its error: checkpoints are read with weights_only
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from schoenbat.training.record import CHECKPOINT, PART, SHARDED_CHECKPOINT, flattened

# What reading a damaged file raises.
DAMAGE = (RuntimeError, EOFError, ValueError, OSError, KeyError, AttributeError, pickle.UnpicklingError)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be continued from."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors in plain containers) to ``path``.

    Raises:
        CheckpointError: if that fails, for want of space for example; ``path`` is then what it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=PART)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        raise unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote, onto the CPU."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGE as error:
        raise unreadable(path, error) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"checkpoint {path} holds a {type(state).__name__}, not a run's state; delete it to train from "
            "the beginning"
        )
    return state


def unwritable(path: Path, error: BaseException) -> CheckpointError:
    """What to say where a checkpoint cannot be written."""
    return CheckpointError(
        f"checkpoint {path} cannot be written ({_reason(error)}); the one before it is kept: make room and "
        "continue with --resume"
    )


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """What to say of a damaged checkpoint."""
    return CheckpointError(
        f"checkpoint {path} cannot be read ({_reason(error)}); delete it to train from the beginning"
    )


def unfitting(path: Path, error: BaseException) -> CheckpointError:
    """What to say of a checkpoint that is whole, but of other parts than this version writes."""
    reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
    return CheckpointError(
        f"checkpoint {path} does not fit this version of schoenbat ({type(error).__name__}: {reason}); "
        "delete it to train from the beginning"
    )


def _reason(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def remove_others(path: Path) -> None:
    """Remove the checkpoints that stand beside ``path``, the newest one."""
    remove_unfinished(path.parent)
    for other in path.parent.glob(f"{SHARDED_CHECKPOINT}*"):
        if other != path:
            # One that is removed in part does not have the name of a checkpoint.
            shutil.rmtree(other.rename(other.with_suffix(PART)))
    if path.name != CHECKPOINT:
        (path.parent / CHECKPOINT).unlink(missing_ok=True)


def remove_unfinished(directory: Path) -> None:
    """Remove what was left of a checkpoint that was being written or removed when the program ended."""
    for unfinished in directory.glob(f"checkpoint*{PART}"):
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink()


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


def set_random_state(fabric: Fabric, states: Tensor) -> bool:
    """Draw on as at the time of `random_states`; False where that was with other devices or more or fewer."""
    if len(states) != fabric.world_size:
        return False
    own = states[fabric.global_rank]
    size = torch.get_rng_state().numel()
    if fabric.device.type == "cuda" and own.numel() == size:
        return False
    # Copies: torch 2.13 crashes on a view into the middle of a tensor.
    torch.set_rng_state(own[:size].clone())
    if fabric.device.type == "cuda":
        torch.cuda.set_rng_state(own[size:].clone(), fabric.device)
    return True
