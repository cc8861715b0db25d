"""The engine: it learns, records, stops at what is not finite, and continues to the same end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training.tiny import tiny_options, tiny_task

from schoenbat.registry import attention_names
from schoenbat.training import checkpoint
from schoenbat.training.failure import NonFiniteError
from schoenbat.training.interruption import Interrupted, StopRequest
from schoenbat.training.log import read_log
from schoenbat.training.record import CHECKPOINT, LOG
from schoenbat.training.replay import Replayed
from schoenbat.training.run import Progress, Run, train
from schoenbat.training.turns import setting_up, turn

# Sums depend on how many threads share them: as many as in the tests themselves.
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def weights(directory):
    return checkpoint.load(directory / CHECKPOINT)["model"]


def assert_same_end(first, second):
    for name, tensor in weights(first).items():
        assert tensor.equal(weights(second)[name]), name
    assert read_log(first / LOG) == read_log(second / LOG)


@pytest.mark.parametrize("paired", [False, True])
def test_it_learns_and_records(tmp_path, paired):
    reports = []
    task = tiny_task(paired=paired)
    options = tiny_options("softmax", steps=120)
    record = train(task, options, tmp_path, on_progress=reports.append)
    losses = [report.loss for report in reports if report.loss is not None]
    assert losses[-1] < 0.1 < losses[0]
    assert record.best.validation == max(r.validation for r in reports if r.validation is not None)
    assert record.last.step == record.steps == options.protocol.steps
    assert record.last.test > record.majority + 0.2
    assert record.timed_steps == options.protocol.steps - 10
    assert record.seconds > 0
    assert record.data == task.fingerprint
    assert [r.step for r in reports if r == Progress(r.step)] == list(range(1, record.steps + 1))
    begun = [(r.step, r.evaluates) for r in reports if r.evaluates is not None]
    validated = [(r.step, "validation") for r in reports if r.validation is not None]
    assert begun[: len(validated)] == validated
    assert {*begun[len(validated) :]} == {(record.steps, "test")}
    assert (tmp_path / "tensorboard").is_dir()


@pytest.mark.parametrize("attention", attention_names())
def test_every_attention_trains(tmp_path, attention):
    record = train(tiny_task(), tiny_options(attention, steps=4, warmup=1, evaluate_every=4), tmp_path)
    assert record.attention == attention
    assert 0 <= record.last.test <= 1


def test_the_best_checkpoint_decides(tmp_path, monkeypatch):
    """Validation accuracies are made up: the best one that may be selected is the third."""
    made_up = iter([0.9, 0.5, 0.7, 0.6])
    evaluate = Run.evaluate
    task = tiny_task()
    seen, tested = {}, []

    def fake(self, split):
        if split == "validation" and len(seen) < 4:
            seen[self.step] = {name: x.clone() for name, x in self.module.state_dict().items()}
            return next(made_up)
        if split == "test":
            tested.append({name: x.clone() for name, x in self.module.state_dict().items()})
        return evaluate(self, split)

    monkeypatch.setattr(Run, "evaluate", fake)
    options = tiny_options(steps=40, evaluate_every=10, select_after=0.5)
    record = train(task, options, tmp_path)
    assert (record.best.step, record.best.validation) == (30, 0.7)
    last, best = tested
    assert all(x.equal(seen[30][name]) for name, x in best.items())
    assert all(x.equal(seen[40][name]) for name, x in last.items())


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_task(), tiny_options(steps=20, evaluate_every=10, seed=seed), tmp_path / name)
    assert_same_end(tmp_path / "a", tmp_path / "b")
    assert read_log(tmp_path / "a" / LOG) != read_log(tmp_path / "c" / LOG)


@pytest.mark.parametrize("stop_at", [7, 20, 33])
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not_been(tmp_path, stop_at):
    options = tiny_options(steps=40, evaluate_every=10)
    whole = train(tiny_task(), options, tmp_path / "whole")

    def stop(progress):
        if progress.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match=f"after step {stop_at}"):
        train(tiny_task(), options, tmp_path / "parts", on_progress=stop)
    torch.manual_seed(99)  # whatever happens in between
    resumed = train(tiny_task(), options, tmp_path / "parts", resume=True)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    assert (resumed.best, resumed.last) == (whole.best, whole.last)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_two_steps_adds_nothing_to_the_log(tmp_path, monkeypatch, number):
    options = tiny_options("mean", steps=20, evaluate_every=10, checkpoint_seconds=0.0)
    save = Run.save

    def save_and_stop(self):
        save(self)
        if self.step == 10 and not self.stop:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Run, "save", save_and_stop)
    with pytest.raises(Interrupted, match="after step 10") as stopped:
        train(tiny_task(), options, tmp_path)
    assert stopped.value.number == number
    assert [line["step"] for line in read_log(tmp_path / LOG)] == [10, 10]  # training, validation


@pytest.mark.parametrize(("first", "then"), [(False, True), (True, False), (True, True)])
def test_a_run_is_alone_where_all_of_its_parts_were(tmp_path, first, then):
    def stop(progress):
        if progress.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(tiny_task(), tiny_options("mean", steps=20, alone=first), tmp_path, on_progress=stop)
    record = train(tiny_task(), tiny_options("mean", steps=20, alone=then), tmp_path, resume=True)
    assert record.alone == (first and then)


@contextmanager
def stopped_at(step, split) -> Iterator[None]:
    """A run inside is asked to stop as it begins to evaluate, and does."""
    evaluate = Run.evaluate

    def stop_first(self, evaluated):
        if (self.step, evaluated) == (step, split):
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, evaluated)

    message = "while testing" if split == "test" else f"after step {step}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "evaluate", stop_first)
        with pytest.raises(Interrupted, match=message):
            yield


def test_a_run_stopped_while_testing_tests_again(tmp_path):
    options = tiny_options("mean", steps=20)
    with stopped_at(20, "test"):
        train(tiny_task(), options, tmp_path)
    assert train(tiny_task(), options, tmp_path, resume=True).last.step == 20


def test_a_run_that_only_has_its_test_left_says_how_its_steps_were_run(tmp_path):
    options = tiny_options("mean", steps=20)
    with stopped_at(20, "test"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replayed, "captured", True)
        train(tiny_task(), options, tmp_path)
    assert train(tiny_task(), options, tmp_path, resume=True).captured
    assert not train(tiny_task(), options, tmp_path / "undisturbed").captured


def test_a_run_stopped_while_validating_validates_again(tmp_path):
    options = tiny_options("mean", steps=40, evaluate_every=10)
    train(tiny_task(), options, tmp_path / "whole")
    with stopped_at(20, "validation"):
        train(tiny_task(), options, tmp_path / "parts")
    assert checkpoint.load(tmp_path / "parts" / CHECKPOINT)["step"] == 20
    train(tiny_task(), options, tmp_path / "parts", resume=True)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_a_run_stopped_in_its_last_validation_is_complete_afterwards(tmp_path):
    options = tiny_options("mean", steps=20, evaluate_every=20)
    with stopped_at(20, "validation"):
        train(tiny_task(), options, tmp_path)
    record = train(tiny_task(), options, tmp_path, resume=True)
    assert record.last.step == 20
    assert record.last.validation is not None


SCRIPT = """
import sys
from pathlib import Path
from training.tiny import tiny_options, tiny_task
from schoenbat.training.run import train
options = tiny_options(steps=2000, evaluate_every=20, checkpoint_seconds=0.0)
train(tiny_task(), options, Path(sys.argv[1]), resume=True)
"""


def test_kill_9_loses_nothing_but_time(tmp_path):
    """Killed at a moment of its own choosing, the checkpoint it leaves continues to the undisturbed end."""
    environment = os.environ | ENVIRONMENT
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "parts")], env=environment)
    deadline = time.monotonic() + 120
    while not (tmp_path / "parts" / CHECKPOINT).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.kill()
    process.wait()
    done = checkpoint.load(tmp_path / "parts" / CHECKPOINT)["step"]
    assert 0 < done < 2000
    options = tiny_options(steps=2000, evaluate_every=20)
    # Both go on to the same step and stop there: a whole run of 2,000 steps would show no more.
    goal = done + 25

    def stop(progress):
        if progress.step == goal:
            os.kill(os.getpid(), signal.SIGTERM)

    for name in ("parts", "whole"):
        with pytest.raises(Interrupted):
            train(tiny_task(), options, tmp_path / name, resume=True, on_progress=stop)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_slow_steps_are_saved_between_reports(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Run, "save", lambda self: saved.append(self.step))
    train(tiny_task(), tiny_options("mean", steps=20, checkpoint_seconds=0.0), tmp_path / "often")
    assert saved == list(range(1, 21))
    assert [line["step"] for line in read_log(tmp_path / "often" / LOG)] == [10, 20, 20]


def test_a_checkpoint_of_other_options_or_data_is_refused(tmp_path):
    train(tiny_task(), tiny_options(steps=20), tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="seed: 0 there, 1 here"):
        train(tiny_task(), tiny_options(steps=20, seed=1), tmp_path, resume=True)
    with pytest.raises(checkpoint.CheckpointError, match="data: 'tiny 0 False' there, 'tiny 1 False' here"):
        train(tiny_task(seed=1), tiny_options(steps=20), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda state: state.pop("counters"), "KeyError: 'counters'"),
        (lambda state: state["model"].pop("norm.bias"), r'Classifier: Missing key\(s\) .*"norm.bias"'),
        (lambda state: state["best"].update(loss=0.5), "TypeError: .*'loss'"),
    ],
)
def test_a_checkpoint_of_another_version_is_refused(tmp_path, spoil, reason):
    train(tiny_task(), tiny_options("mean", steps=20), tmp_path)
    state = checkpoint.load(tmp_path / CHECKPOINT)
    spoil(state)
    checkpoint.save(tmp_path / CHECKPOINT, state)
    with pytest.raises(checkpoint.CheckpointError, match=f"does not fit .*{reason}.*; delete it to train"):
        train(tiny_task(), tiny_options("mean", steps=20), tmp_path, resume=True)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_is_not_finite_stops_the_run_and_is_named(tmp_path, monkeypatch, where):
    build = Run._set_up

    def break_later(self):
        build(self)
        calls = iter(range(1000))

        def spoil(module, inputs, output):
            return output * float("nan") if next(calls) >= 25 else output

        def spoil_gradient(module, inputs, output):
            if next(calls) >= 25:
                output.register_hook(lambda gradient: gradient * float("nan"))

        target = self.module.layers[1].output
        target.register_forward_hook(spoil if where == "forward" else spoil_gradient)

    monkeypatch.setattr(Run, "_set_up", break_later)
    options = tiny_options("mean", steps=60, evaluate_every=60, report_every=5, checkpoint_seconds=0.0)
    with pytest.raises(NonFiniteError) as caught:
        train(tiny_task(), options, tmp_path)
    assert caught.value.step == 26
    assert caught.value.learning_rate == pytest.approx(options.protocol.learning_rate_at(25))
    assert "layers.1." in caught.value.layer
    assert where in caught.value.layer
    kept = checkpoint.load(tmp_path / CHECKPOINT)
    assert kept["step"] == 25
    assert all(tensor.isfinite().all() for tensor in kept["model"].values())


@pytest.mark.parametrize(
    "error", [Interrupted("stopped", signal.SIGTERM), NonFiniteError(12, 0.0, None, float("nan"))]
)
def test_a_run_closes_its_log_however_it_ends(tmp_path, error):
    """TensorBoard writes by a thread of its own."""

    def end(progress):
        if progress.step == 12:
            raise error

    before = set(threading.enumerate())
    with pytest.raises(type(error)):
        train(tiny_task(), tiny_options("mean", steps=20), tmp_path, on_progress=end)
    assert (tmp_path / "tensorboard").is_dir()
    assert set(threading.enumerate()) <= before


def test_timing_leaves_no_checkpoint(tmp_path):
    record = train(tiny_task(), tiny_options("mean", steps=400, timing=True), tmp_path)
    assert record.best is None
    assert (record.steps, record.timed_steps) == (210, 200)
    assert not (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize(("steps", "timed"), [(400, 200), (35, 25), (11, 1)])
def test_a_disturbance_while_timing_does_not_count(tmp_path, monkeypatch, steps, timed):
    """By a clock that a step takes a second of, and whatever comes at step 55 a minute."""
    now = 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal now
        now += 60.0 if progress.step == 55 else 1.0

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("schoenbat.training.costs.time", clock)
    options = tiny_options("mean", steps=steps, timing=True)
    record = train(tiny_task(), options, tmp_path, on_progress=on_progress)
    assert (record.timed_steps, record.seconds) == (timed, timed)


def test_a_run_that_is_timed_waits_for_its_turn(tmp_path, monkeypatch):
    waited = []

    def on_progress(progress: Progress) -> None:
        if progress.is_waiting:
            waited.append(progress.step)
            release.set()

    def hold() -> None:
        with turn(StopRequest(), lambda: None):
            held.set()
            release.wait(60)

    held, release = threading.Event(), threading.Event()
    other = threading.Thread(target=hold)

    @contextmanager
    def then_another_is_timed() -> Iterator[None]:
        with setting_up():
            yield
        other.start()
        held.wait(60)

    monkeypatch.setattr("schoenbat.training.run.setting_up", then_another_is_timed)
    options = tiny_options("mean", steps=20, timing=True)
    record = train(tiny_task(), options, tmp_path, on_progress=on_progress)
    other.join()
    assert waited == [4]
    assert record.timed_steps == 10


def test_a_batch_that_cannot_be_split_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning.fabric.Fabric.world_size", 3)
    with pytest.raises(ValueError, match="batch of 16 cannot be split over 3 devices"):
        train(tiny_task(), tiny_options(), tmp_path)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    torch.save({"weights": 1}, tmp_path / CHECKPOINT)
    with pytest.raises(checkpoint.CheckpointError, match="delete it to train from the beginning"):
        train(tiny_task(), tiny_options("mean", steps=20), tmp_path, resume=True)
