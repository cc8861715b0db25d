"""What of a run goes into its checkpoint, and how a run goes on from one."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from schoenbat.training import checkpoint, shards
from schoenbat.training.processes import is_lost_connection, is_sharded, spread
from schoenbat.training.record import CHECKPOINT, Accuracy

if TYPE_CHECKING:
    from schoenbat.training.run import Run


def save(run: "Run") -> None:
    """Write a checkpoint, of one file or of as many shards as there are processes."""
    weights, optimizer = run.module.state_dict(), run.optimizer.state_dict()
    rest = {
        "options": run.options.identity,
        "data": run.task.fingerprint,
        "step": run.step,
        "counters": checkpoint.on_cpu(run.training_step.counters()),
        "random_states": checkpoint.random_states(run.fabric),
        "best": None if run.best is None else asdict(run.best),
        "validation": run.validation,
        "validation_is_due": run.validation_is_due,
        "alone": run.alone,
        "captured": run.captured,
    } | run.costs.state()
    if is_sharded(run.fabric):
        tensors = {"model": weights, "best_weights": run.best_weights, "optimizer": optimizer["state"]}
        shards.save(run.fabric, run.directory, tensors, rest)
    elif run.fabric.is_global_zero:
        tensors = {"model": checkpoint.on_cpu(weights), "best_weights": run.best_weights}
        path = run.directory / CHECKPOINT
        checkpoint.save(path, {**rest, **tensors, "optimizer": optimizer})
        checkpoint.remove_others(path)
    run.fabric.barrier()


def restore(run: "Run", path: Path) -> None:
    """Continue from a checkpoint that any number of devices wrote, by any strategy."""
    state = shards.load_rest(path) if path.is_dir() else checkpoint.load(path)
    wanted = run.options.identity | {"data": run.task.fingerprint}
    try:
        saved = state["options"] | {"data": state["data"]}
    except (KeyError, TypeError) as error:
        raise checkpoint.unreadable(path, error) from error
    checkpoint.refuse_other_options(path, {name: saved.get(name) for name in wanted}, wanted)
    try:
        _restore(run, path, state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        # Other kinds of RuntimeError, as where a device has no memory left, do not speak of the checkpoint.
        is_other_kind = isinstance(error, RuntimeError) and type(error) is not RuntimeError
        if is_other_kind or is_lost_connection(error):
            raise
        raise checkpoint.unfitting(path, error) from error


def _restore(run: "Run", path: Path, state: dict[str, Any]) -> None:
    _restore_tensors(run, path, state)
    run.step = state["step"]
    run.training_step.restore(state["counters"])
    run.best = None if state["best"] is None else Accuracy(**state["best"])
    run.validation, run.validation_is_due = state["validation"], state.get("validation_is_due", False)
    run.costs.restore(state)
    run.alone = run.alone and state.get("alone", True)
    run.was_captured = state.get("captured", False)
    if not checkpoint.set_random_state(run.fabric, state["random_states"]):
        torch.manual_seed(1_000_003 * run.step + run.options.seed + 1 + run.fabric.global_rank)


def _restore_tensors(run: "Run", path: Path, state: dict[str, Any]) -> None:
    if path.is_dir():
        tensors = shards.load(path, _empty_tensors(run))
    else:
        tensors = {
            "model": state["model"],
            "best_weights": state["best_weights"] or {},
            "optimizer": state["optimizer"]["state"],
        }
        if is_sharded(run.fabric):
            tensors = spread(tensors, _empty_tensors(run))
    run.module.load_state_dict(tensors["model"])
    run.best_weights = tensors["best_weights"]
    groups = run.optimizer.state_dict()["param_groups"]
    run.optimizer.load_state_dict({"state": tensors["optimizer"], "param_groups": groups})
    for group in run.optimizer.param_groups:
        group["lr"] = run.training_step.learning_rate


def _empty_tensors(run: "Run") -> dict[str, Any]:
    """Of all tensors that a checkpoint may hold, what this device has: to be overwritten."""
    weights = run.module.state_dict()
    moments = {
        number: {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        for number, parameter in enumerate(run.module.parameters())
    }
    return {"model": weights, "best_weights": checkpoint.on_cpu(weights), "optimizer": moments}
