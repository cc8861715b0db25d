"""Checkpoints as directories: every process writes the part it holds, and any number of them reads it back.

``torch.distributed.checkpoint`` writes and reads the tensors. A directory is written under another name and
renamed when all of it is on the disk, so one that has the name of a checkpoint is whole.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from torch.distributed.checkpoint.api import CheckpointException

from schoenbat.training import checkpoint
from schoenbat.training.record import PART, SHARDED_CHECKPOINT, SHARDED_REST


def save(fabric: Fabric, directory: Path, tensors: dict[str, Any], rest: dict[str, Any]) -> None:
    """Write a checkpoint into ``directory``, which all processes see, and remove those before it.

    Args:
        fabric: the processes; all of them call.
        directory: the run's.
        tensors: dictionaries of tensors, whole or of which each process holds a part.
        rest: everything else, of the first process.
    """
    path = fabric.broadcast(_next(directory))
    part = path.with_suffix(PART)
    if fabric.is_global_zero:
        checkpoint.remove_unfinished(directory)
        part.mkdir(parents=True)
    fabric.barrier()
    try:
        dcp.save(tensors, checkpoint_id=part)
    except CheckpointException as error:
        raise checkpoint.unwritable(path, _reason(error)) from error
    if fabric.is_global_zero:
        checkpoint.save(part / SHARDED_REST, rest)
        part.rename(path)
        _synchronize(directory)
        checkpoint.remove_others(path)
    fabric.barrier()


def _next(directory: Path) -> Path:
    """A name that no checkpoint has yet."""
    taken = [path.stem.removeprefix(SHARDED_CHECKPOINT) for path in directory.glob(f"{SHARDED_CHECKPOINT}*")]
    number = 1 + max((int(name) for name in taken if name.isdecimal()), default=0)
    return directory / f"{SHARDED_CHECKPOINT}{number}"


def load_rest(path: Path) -> dict[str, Any]:
    """What was saved as ``rest``."""
    return checkpoint.load(path / SHARDED_REST)


def load(path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """The ``tensors`` that a checkpoint holds, overwritten with what was saved; all processes call."""
    try:
        saved = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    except checkpoint.DAMAGE as error:
        raise checkpoint.unreadable(path, error) from error
    there = {name: _only(group, f"{name}.", saved) for name, group in tensors.items()}
    try:
        with warnings.catch_warnings():
            # One process reads what several have written: that is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(there, checkpoint_id=path)
    except CheckpointException as error:
        raise checkpoint.unreadable(path, _reason(error)) from error
    return there


def _only(tensors: dict[Any, Any], prefix: str, names: set[str]) -> dict[Any, Any]:
    """Those of ``tensors`` whose names, joined with dots, are among ``names``."""
    kept: dict[Any, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, dict):
            inside = _only(value, f"{prefix}{name}.", names)
            kept |= {name: inside} if inside else {}
        elif f"{prefix}{name}" in names:
            kept[name] = value
    return kept


def _reason(error: CheckpointException) -> BaseException:
    """What went wrong on the first process that failed."""
    return next((cause for cause, _ in error.failures.values()), error)


def _synchronize(directory: Path) -> None:
    """Have the names in a directory on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
