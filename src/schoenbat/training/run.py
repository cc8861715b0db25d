"""One training run: a task, an attention, a seed; from the first step to the record of its result."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from schoenbat.data.retrieval import floors
from schoenbat.data.task import Task
from schoenbat.training import checkpoint
from schoenbat.training.batches import DeviceSplit, batch_order
from schoenbat.training.classifier import Classifier
from schoenbat.training.evaluation import accuracy
from schoenbat.training.interruption import Interrupted, StopRequest
from schoenbat.training.log import RunLog
from schoenbat.training.protocol import Protocol
from schoenbat.training.record import CHECKPOINT, LOG, TIMED_STEPS, WARM_STEPS, Accuracy, RunRecord, revision
from schoenbat.training.step import TrainingStep


@dataclass(frozen=True)
class RunOptions:
    """What is trained, by which protocol, and on what."""

    task: str
    attention: str
    protocol: Protocol
    seed: int = 0
    accelerator: str = "auto"
    devices: int = 1
    precision: str = "32-true"
    """Or ``"bf16-mixed"``: products in bfloat16, weights and attention's state in float32."""
    compiled: bool = False
    """Whether ``torch.compile`` runs the model."""
    timing: bool = False
    """Only time 200 steps: no evaluation, no checkpoint."""
    alone: bool = True
    report_every: int = 50
    checkpoint_seconds: float = 60.0

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in with the run that continues from it."""
        kept = {"task", "attention", "seed", "protocol", "devices", "precision", "compiled", "report_every"}
        return {name: value for name, value in asdict(self).items() if name in kept}


@dataclass(frozen=True)
class Progress:
    """After ``step`` steps; what was not measured at that step is None."""

    step: int
    loss: float | None = None
    accuracy: float | None = None
    validation: float | None = None
    steps_per_second: float | None = None


OnProgress = Callable[[Progress], None]


def _quiet(progress: Progress) -> None:
    """Say nothing."""


def train(
    task: Task,
    options: RunOptions,
    directory: Path,
    *,
    resume: bool = False,
    on_progress: OnProgress = _quiet,
) -> RunRecord | None:
    """Train and test; ``directory`` keeps what is needed to continue. All devices but the first return None.

    Args:
        task: the data.
        options: everything else.
        directory: where checkpoint and logs go.
        resume: continue from the checkpoint in ``directory`` if there is one.
        on_progress: called after every step on the first device, with more at some of them.

    Raises:
        NonFiniteError: if a loss or gradient is NaN or infinite.
        Interrupted: after SIGTERM or Ctrl-C, once a checkpoint is saved.
    """
    fabric = _fabric(options)
    fabric.launch()
    run = Run(fabric, task, options, directory, on_progress if fabric.is_global_zero else _quiet)
    if resume and not options.timing and run.checkpoint.exists():
        run.restore()
    with run.stop.listening():
        run.train()
        record = run.record()
    return record if fabric.is_global_zero else None


class Run:
    """The state of a run in one process."""

    def __init__(
        self,
        fabric: Fabric,
        task: Task,
        options: RunOptions,
        directory: Path,
        on_progress: OnProgress = _quiet,
    ) -> None:
        self.fabric, self.task, self.options, self.on_progress = fabric, task, options, on_progress
        self.protocol = options.protocol
        self.directory, self.checkpoint = directory, directory / CHECKPOINT
        self.step, self.best, self.best_weights = 0, None, None  # type: int, Accuracy | None, dict | None
        self.validation = float("nan")
        self.seconds, self.timed_steps, self.peak_memory = 0.0, 0, 0
        self.stop = StopRequest()
        self.log: RunLog | None = None
        self._saved_at = time.monotonic()
        # All devices build the same weights; what is drawn while training differs.
        torch.manual_seed(options.seed)
        self.module = build_model(task, options)
        torch.manual_seed(options.seed + 1 + fabric.global_rank)
        self._set_up()

    def _set_up(self) -> None:
        protocol, fabric, device = self.protocol, self.fabric, self.fabric.device
        world, rank = fabric.world_size, fabric.global_rank
        if protocol.batch_size % world:
            raise ValueError(f"a batch of {protocol.batch_size} cannot be split over {world} devices evenly")
        optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=torch.tensor(protocol.learning_rate, device=device),
            betas=protocol.betas,
            eps=protocol.eps,
            weight_decay=protocol.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.module.to(device)
        model: Any = torch.compile(self.module) if self.options.compiled else self.module
        self.model, self.optimizer = fabric.setup(model, optimizer)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        stores: dict[int, Tensor] = {}
        self.splits = {
            name: DeviceSplit(split, device, stores)
            for name, split in [
                ("train", self.task.train),
                ("validation", self.task.validation),
                ("test", self.task.test),
            ]
        }
        self.data_memory = torch.cuda.memory_allocated() - before if device.type == "cuda" else 0
        share = protocol.batch_size // world
        order = batch_order(len(self.splits["train"]), protocol.batch_size, protocol.steps, self.options.seed)
        rates = [protocol.learning_rate_at(step) for step in range(protocol.steps)]
        self.training_step = TrainingStep(
            fabric,
            self.model,
            self.optimizer,
            self.splits["train"],
            order[:, rank * share : (rank + 1) * share].to(device),
            torch.tensor(rates, device=device),
            protocol.clip_value,
        )

    def train(self) -> None:
        """All steps that are left."""
        if self.fabric.is_global_zero and not self.options.timing:
            self.log = RunLog(self.directory / LOG, self.step)
        first = self.step
        end = self.protocol.steps
        if self.options.timing:
            end = min(end, WARM_STEPS + TIMED_STEPS)
        self.model.train()
        while self.step < end:
            goal = self._next_stop(first, end)
            before = self.step
            self.advance(goal, timed=self.step >= first + WARM_STEPS)
            if self.step > before and not self.options.timing:
                self._report_and_validate(end)
            if self._asked_to_stop():
                self._interrupt()
            if not self.options.timing:
                self._save_if_due(end)
        self.training_step.tally()
        if self.log is not None:
            self.log.close()

    def _next_stop(self, first: int, end: int) -> int:
        """The next step at which something else than training is done."""
        every = (self.options.report_every, self.protocol.evaluate_every)
        stops = [(self.step // n + 1) * n for n in every] + [end]
        warm = first + WARM_STEPS
        return min([*stops, warm] if self.step < warm else stops)

    def advance(self, goal: int, *, timed: bool) -> None:
        """Train up to step ``goal``, or until asked to stop."""
        cuda = self.fabric.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        started, start = time.perf_counter(), self.step
        while self.step < goal and not (self.stop and self.fabric.world_size == 1):
            self.training_step.run()
            self.step += 1
            self.on_progress(Progress(self.step))
        if cuda:
            torch.cuda.synchronize()
            self.peak_memory = max(self.peak_memory, torch.cuda.max_memory_allocated())
        if timed:
            self.seconds += time.perf_counter() - started
            self.timed_steps += self.step - start

    def _report_and_validate(self, end: int) -> None:
        self.training_step.raise_if_failed()
        if self.step % self.options.report_every == 0 or self.step == end:
            self._report()
        if self.step % self.protocol.evaluate_every == 0 or self.step == end:
            self._validate()

    def _report(self) -> None:
        loss, share = self.training_step.tally()
        rate = self.timed_steps / self.seconds if self.seconds else None
        self.on_progress(Progress(self.step, loss, share, steps_per_second=rate))
        if self.log is not None:
            self.log.write(
                step=self.step,
                loss=loss,
                accuracy=share,
                learning_rate=self.protocol.learning_rate_at(self.step - 1),
            )

    def _validate(self) -> None:
        validation = self.validation = self.evaluate("validation")
        self.on_progress(Progress(self.step, validation=validation))
        if self.log is not None:
            self.log.write(step=self.step, validation=validation)
        if self.protocol.selects(self.step) and (self.best is None or validation > self.best.validation):
            self.best = Accuracy(self.step, validation, float("nan"))
            self.best_weights = checkpoint.on_cpu(self.module.state_dict())

    def evaluate(self, split: str, stop: StopRequest | None = None) -> float:
        """The share of right answers on a split."""
        # Of several devices none may leave the others waiting.
        stop = stop if self.fabric.world_size == 1 else None
        return accuracy(self.fabric, self.model, self.splits[split], self.protocol.batch_size, stop)

    def _asked_to_stop(self) -> bool:
        return bool(self.stop if self.fabric.world_size == 1 else self.fabric.broadcast(bool(self.stop)))

    def _interrupt(self) -> None:
        if not self.options.timing:
            self.save()
        raise Interrupted(f"stopped after step {self.step}", self.stop.number)

    def _save_if_due(self, end: int) -> None:
        due = time.monotonic() - self._saved_at > self.options.checkpoint_seconds or self.step == end
        if self.fabric.broadcast(due):
            self.save()

    def save(self) -> None:
        """Write a checkpoint; a failed step in it would be of no use, so that is looked for first."""
        self.training_step.raise_if_failed()
        random_states = checkpoint.random_states(self.fabric)
        if self.fabric.is_global_zero:
            state = {
                "options": self.options.identity,
                "data": self.task.fingerprint,
                "step": self.step,
                "model": checkpoint.on_cpu(self.module.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "counters": checkpoint.on_cpu(self.training_step.counters),
                "random_states": random_states,
                "best": None if self.best is None else asdict(self.best),
                "best_weights": self.best_weights,
                "validation": self.validation,
                "seconds": self.seconds,
                "timed_steps": self.timed_steps,
                "peak_memory": self.peak_memory,
            }
            checkpoint.save(self.checkpoint, state)
        self.fabric.barrier()
        self._saved_at = time.monotonic()

    def restore(self) -> None:
        """Continue from the checkpoint."""
        state = checkpoint.load(self.checkpoint)
        saved = state["options"] | {"data": state["data"]}
        wanted = self.options.identity | {"data": self.task.fingerprint}
        checkpoint.refuse_other_options(self.checkpoint, saved, wanted)
        self.step = state["step"]
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.training_step.learning_rate
        self.training_step.restore(state["counters"])
        self.best = None if state["best"] is None else Accuracy(**state["best"])
        self.best_weights = state["best_weights"]
        self.validation = state["validation"]
        self.seconds, self.timed_steps = state["seconds"], state["timed_steps"]
        self.peak_memory = state["peak_memory"]
        checkpoint.set_random_state(self.fabric, state["random_states"])

    def record(self) -> RunRecord:
        """Test the last and the best model, and sum up."""
        best = last = None
        if not self.options.timing and self.best is not None and self.best_weights is not None:
            last = Accuracy(self.step, self.validation, self.evaluate("test", self.stop))
            if self.best.step == self.step:
                best = last
            else:
                self.module.load_state_dict(self.best_weights)
                best = replace(self.best, test=self.evaluate("test", self.stop))
        memory = self.peak_memory - self.data_memory if self.fabric.device.type == "cuda" else None
        labels = torch.from_numpy(self.task.test.labels.copy())
        return RunRecord(
            task=self.options.task,
            attention=self.options.attention,
            seed=self.options.seed,
            steps=self.step,
            best=best,
            last=last,
            majority=labels.bincount().max().item() / len(labels),
            parameters=sum(parameter.numel() for parameter in self.module.parameters()),
            seconds=self.seconds,
            timed_steps=self.timed_steps,
            peak_memory=memory,
            devices=self.fabric.world_size,
            alone=self.options.alone,
            data=self.task.fingerprint,
            revision=revision(),
            citations=self._citation_floor(),
            captured=self.training_step.captured,
        )

    def _citation_floor(self) -> float | None:
        if self.task.name != "retrieval":
            return None
        return floors(self.task.train, self.task.test).citations


def _fabric(options: RunOptions) -> Fabric:
    """Devices and precision; under torchrun as many devices and machines as it says."""
    precision: Any = options.precision
    devices, machines = options.devices, 1
    if torch.distributed.is_torchelastic_launched():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        machines = int(os.environ["WORLD_SIZE"]) // devices
    return Fabric(accelerator=options.accelerator, devices=devices, num_nodes=machines, precision=precision)


def build_model(task: Task, options: RunOptions) -> Classifier:
    """The paper's model for a task."""
    protocol = options.protocol
    return Classifier(
        options.attention,
        vocab_size=max(protocol.embedding_rows, task.vocab_size),
        num_classes=task.num_classes,
        max_length=task.max_length,
        dropout=protocol.dropout,
        paired=task.paired,
    )
