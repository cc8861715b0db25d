"""Training runs as their result files tell of them, for tables."""

from dataclasses import replace

from schoenbat.training.record import Accuracy, RunRecord, RunResult

RECORD = RunRecord(
    task="text",
    attention="softmax",
    seed=0,
    steps=10_000,
    best=Accuracy(8_000, 0.7, 0.6),
    last=Accuracy(10_000, 0.65, 0.5),
    majority=0.5,
    parameters=76_000,
    seconds=2.0,
    timed_steps=200,
    peak_memory=3 * 2**20,
    devices=1,
    alone=True,
    data="abc",
    revision=None,
)


def run(test=0.6, validation=0.7, settings=None, **more):
    record = replace(RECORD, best=Accuracy(8_000, validation, test), **more)
    options = {"task": record.task, "seed": record.seed} | (settings or {})
    return RunResult(record, options, "H200", "2026-01-01")


def timing(milliseconds, **more):
    record = replace(RECORD, best=None, last=None, steps=210, seconds=milliseconds / 5, **more)
    return RunResult(record, {"task": record.task}, "H200", "2026-01-01")
