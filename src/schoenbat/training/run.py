"""One training run: a task, an attention, a seed; from the first step to the record of its result."""

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from schoenbat.data.retrieval import floors
from schoenbat.data.task import Task
from schoenbat.normalization import synchronize_statistics
from schoenbat.training import checkpoint, resuming
from schoenbat.training.batches import DeviceSplit, batch_order
from schoenbat.training.classifier import build_model
from schoenbat.training.costs import Costs
from schoenbat.training.evaluation import Evaluation
from schoenbat.training.interruption import Interrupted, StopRequest
from schoenbat.training.log import RunLog
from schoenbat.training.options import RunOptions
from schoenbat.training.processes import (
    LostProcessError,
    any_process,
    is_lost_connection,
    launch,
    make_fabric,
    share_of_batch,
)
from schoenbat.training.record import (
    LOG,
    TIMED_BLOCK,
    TIMED_STEPS,
    WARM_STEPS,
    Accuracy,
    RunRecord,
    find_checkpoint,
    revision,
)
from schoenbat.training.replay import EAGER_RUNS
from schoenbat.training.step import TrainingStep
from schoenbat.training.turns import setting_up, turn

# Several devices ask each other after so many steps whether one of them was asked to stop.
AGREE_EVERY = 10


@dataclass(frozen=True)
class Progress:
    """After ``step`` steps; what was not measured at that step is None."""

    step: int
    loss: float | None = None
    accuracy: float | None = None
    validation: float | None = None
    steps_per_second: float | None = None
    is_waiting: bool = False
    """For other runs, which are timed."""
    evaluates: str | None = None
    """The split on which it is evaluated now, which takes a while."""


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
        LostProcessError: if another process has ended before its work was done.
    """
    fabric = make_fabric(options.accelerator, options.devices, options.strategy, options.precision)
    launch(fabric)
    takes_turns = options.timing and fabric.world_size == 1
    with setting_up() if takes_turns else nullcontext():
        run = Run(fabric, task, options, directory, on_progress if fabric.is_global_zero else _quiet)
        if takes_turns:
            run.take_first_steps()
    try:
        # All processes read the one that the first finds.
        found = fabric.broadcast(find_checkpoint(directory))
        if resume and not options.timing and found is not None:
            run.restore(found)
        with run.stop.listening(), turn(run.stop, run.tell_waiting) if takes_turns else nullcontext():
            run.train()
            record = run.record()
    except RuntimeError as error:
        if fabric.world_size > 1 and is_lost_connection(error):
            raise LostProcessError(error, run.saved_step) from error
        raise
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
        self.directory = directory
        self.step, self.best, self.best_weights = 0, None, {}  # type: int, Accuracy | None, dict[str, Tensor]
        self.validation_is_due = False
        self.validation = float("nan")
        self.costs = Costs(fabric.device)
        self.alone = options.alone
        self.was_captured = False  # by the parts of the run before this one
        self.stop = StopRequest()
        self.log: RunLog | None = None
        self._saved_at, self.saved_step = time.monotonic(), 0
        # All devices build the same weights; what is drawn while training differs.
        torch.manual_seed(options.seed)
        self.module = build_model(task, options)
        torch.manual_seed(options.seed + 1 + fabric.global_rank)
        self._set_up()

    def _set_up(self) -> None:
        batch_size = self.protocol.batch_size
        self.share = share_of_batch(batch_size, self.fabric.world_size)
        self._place_model()
        self.optimizer = self._make_optimizer()
        train, validation, test = self._place_data()
        self.training_step = self._make_training_step(train)
        self.evaluations = {
            name: Evaluation(self.fabric, self.model, split, batch_size)
            for name, split in (("validation", validation), ("test", test))
        }

    def _place_model(self) -> None:
        self.module.to(self.fabric.device)
        if torch.distributed.group.WORLD is not None and self.fabric.world_size > 1:
            synchronize_statistics(self.module, torch.distributed.group.WORLD)
        model: Any = torch.compile(self.module) if self.options.compiled else self.module
        self.model = self.fabric.setup_module(model)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        device = self.fabric.device
        optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=torch.tensor(self.protocol.learning_rate, device=device),
            betas=self.protocol.betas,
            eps=self.protocol.eps,
            weight_decay=self.protocol.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        return cast(torch.optim.Optimizer, self.fabric.setup_optimizers(optimizer))

    def _place_data(self) -> list[DeviceSplit]:
        stores: dict[int, Tensor] = {}
        splits = self.task.train, self.task.validation, self.task.test
        with self.costs.of_data():
            return [DeviceSplit(split, self.fabric.device, stores) for split in splits]

    def _make_training_step(self, split: DeviceSplit) -> TrainingStep:
        protocol, fabric, device = self.protocol, self.fabric, self.fabric.device
        order = batch_order(len(split), protocol.batch_size, protocol.steps, self.options.seed)
        own = order[:, fabric.global_rank * self.share : (fabric.global_rank + 1) * self.share]
        rates = [protocol.learning_rate_at(step) for step in range(protocol.steps)]
        return TrainingStep(
            fabric,
            self.model,
            self.optimizer,
            split,
            own.to(device),
            torch.tensor(rates, device=device),
            protocol.clip_value,
        )

    def take_first_steps(self) -> None:
        """Those in which everything is compiled and captured."""
        self.model.train()
        self.advance(min(EAGER_RUNS + 1, self.protocol.steps), timed=False)

    def tell_waiting(self) -> None:
        """Other runs are timed, or set up to be."""
        self.on_progress(Progress(self.step, is_waiting=True))

    def train(self) -> None:
        """All steps that are left; of a run that is only timed, as many as that takes."""
        self.model.train()
        if self.options.timing:
            self._time()
        else:
            self._train()
        self.training_step.tally()

    def _train(self) -> None:
        writes = self.fabric.is_global_zero
        with closing(RunLog(self.directory / LOG, self.step)) if writes else nullcontext() as self.log:
            self._train_to_the_end()

    def _train_to_the_end(self) -> None:
        first, end = self.step, self.protocol.steps
        if self.validation_is_due:
            self._validate()
            self._save_if_due(end)
        while self.step < end:
            goal = self._next_stop(first, end)
            before = self.step
            self.advance(goal, timed=self.step >= first + WARM_STEPS)
            if self.step > before:
                self._report_and_validate(end)
            if self._asked_to_stop():
                self._interrupt()
            self._save_if_due(end)

    def _time(self) -> None:
        end = min(self.protocol.steps, WARM_STEPS + TIMED_STEPS)
        while self.step < end:
            timed = self.step >= WARM_STEPS
            self.advance(min(self.step + TIMED_BLOCK if timed else WARM_STEPS, end), timed=timed)
            if self._asked_to_stop():
                self._interrupt()
        self.costs.count_median()

    def _next_stop(self, first: int, end: int) -> int:
        """The next step at which something else than training is done."""
        every = [self.options.report_every, self.protocol.evaluate_every]
        if self.fabric.world_size > 1:
            every.append(AGREE_EVERY)
        stops = [(self.step // n + 1) * n for n in every] + [end]
        warm = first + WARM_STEPS
        return min([*stops, warm] if self.step < warm else stops)

    def advance(self, goal: int, *, timed: bool) -> None:
        """Train up to step ``goal``, or until asked to stop, or until a checkpoint is due."""
        self.costs.start()
        start = self.step
        while self.step < goal and not (self.stop and self.fabric.world_size == 1):
            self.training_step.run()
            self.step += 1
            self.on_progress(Progress(self.step))
            # Steps may be slow; of several devices none may leave the others waiting.
            if self._is_due() and self.fabric.world_size == 1:
                break
        self.costs.stop(self.step - start if timed else 0)

    def _report_and_validate(self, end: int) -> None:
        self.training_step.raise_if_failed()
        if self.step % self.options.report_every == 0 or self.step == end:
            self._report()
        if self.step % self.protocol.evaluate_every == 0 or self.step == end:
            self._validate()

    def _report(self) -> None:
        loss, share = self.training_step.tally()
        self.on_progress(Progress(self.step, loss, share, steps_per_second=self.costs.rate))
        if self.log is not None:
            self.log.write(
                step=self.step,
                loss=loss,
                accuracy=share,
                learning_rate=self.protocol.learning_rate_at(self.step - 1),
            )

    def _validate(self) -> None:
        self.validation_is_due = True
        try:
            validation = self.validation = self.evaluate("validation")
        except Interrupted:
            self._interrupt()
        self.validation_is_due = False
        self.on_progress(Progress(self.step, validation=validation))
        if self.log is not None:
            self.log.write(step=self.step, validation=validation)
        if self.protocol.selects(self.step) and (self.best is None or validation > self.best.validation):
            self.best = Accuracy(self.step, validation)
            self.best_weights = checkpoint.on_cpu(self.module.state_dict())

    def evaluate(self, split: str) -> float:
        """The share of right answers on a split."""
        self.on_progress(Progress(self.step, evaluates=split))
        # Of several devices none may leave the others waiting.
        return self.evaluations[split].accuracy(self.stop if self.fabric.world_size == 1 else None)

    def _asked_to_stop(self) -> bool:
        return any_process(self.fabric, bool(self.stop))

    def _interrupt(self) -> NoReturn:
        if not self.options.timing:
            self.save()
        raise Interrupted(f"stopped after step {self.step}", self.stop.number)

    def _save_if_due(self, end: int) -> None:
        if any_process(self.fabric, self._is_due() or self.step == end):
            self.save()

    def _is_due(self) -> bool:
        waited = time.monotonic() - self._saved_at
        return not self.options.timing and waited > self.options.checkpoint_seconds

    def save(self) -> None:
        """Write a checkpoint; a failed step in it would be of no use, so that is looked for first."""
        self.training_step.raise_if_failed()
        resuming.save(self)
        self._saved_at, self.saved_step = time.monotonic(), self.step

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint that any number of devices wrote, by any strategy."""
        resuming.restore(self, path)
        self.saved_step = self.step

    def record(self) -> RunRecord:
        """Test the last and the best model, and sum up."""
        best = last = None
        if not self.options.timing and self.best is not None:
            last = Accuracy(self.step, self.validation, self.evaluate("test"))
            if self.best.step == self.step:
                best = last
            else:
                self.module.load_state_dict(self.best_weights)
                best = replace(self.best, test=self.evaluate("test"))
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
            seconds=self.costs.seconds,
            timed_steps=self.costs.timed_steps,
            peak_memory=self.costs.memory,
            devices=self.fabric.world_size,
            alone=self.alone,
            data=self.task.fingerprint,
            revision=revision(),
            citations=self._citation_floor(),
            captured=self.captured,
        )

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph ran the steps; of a run that only had its test left, those before."""
        return self.was_captured or self.training_step.run.captured

    def _citation_floor(self) -> float | None:
        if self.task.name != "retrieval":
            return None
        return floors(self.task.train, self.task.test).citations
