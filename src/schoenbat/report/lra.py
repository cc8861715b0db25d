"""The Long Range Arena in rows: all runs by task and attention, beside the paper."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

from schoenbat.experiments.groups import TASKS
from schoenbat.registry import attention_names
from schoenbat.report.paper import printed
from schoenbat.training.gathered import read_runs
from schoenbat.training.record import Accuracy, RunResult

NAIVE, SDPA = "softmax:naive=true", "softmax"
"""The attentions that times are divided by."""
CHANCE_TASK = "pathfinder"
LEFT_CHANCE = 0.55
"""Test accuracy above which a run has learnt to follow paths at all."""
AVERAGES = {
    "average": TASKS,
    "average without retrieval": tuple(task for task in TASKS if task != "retrieval"),
}

Place = tuple[str, str]
"""Task and attention."""
Key = TypeVar("Key")


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over seeds; the deviation of one seed is None.

    >>> Spread.of([0.25, 0.75])
    Spread(mean=0.5, deviation=0.3535533905932738)
    """

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(mean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class LraRow:
    """What is known of an attention on a task, or on the average of several; None for what is not.

    Accuracies are shares. Times and memory are those of training steps.
    """

    task: str
    attention: str
    seeds: int = 0
    steps: int | None = None
    accuracy: Spread | None = None
    """On test, of the checkpoint with the best validation accuracy."""
    last_accuracy: Spread | None = None
    """On test, after the last step."""
    left_chance: float | None = None
    """For Pathfinder the share of seeds above `LEFT_CHANCE`."""
    majority: float | None = None
    citations: float | None = None
    parameters: int | None = None
    step_seconds: float | None = None
    time_over_naive: float | None = None
    """Step time over that of softmax with its scores formed, as in the paper."""
    time_over_sdpa: float | None = None
    peak_memory: int | None = None
    paper_accuracy: float | None = None
    paper_time: float | None = None
    paper_memory: float | None = None
    """In MB."""


@dataclass(frozen=True)
class LraTable:
    """Rows by task, then averages; and what was left out or cannot be compared, in sentences."""

    rows: tuple[LraRow, ...]
    averages: tuple[LraRow, ...]
    notes: tuple[str, ...]
    timed_on: str | None
    """The device of all times."""


def collect(path: Path) -> LraTable:
    """The table of every run under a directory, or in a file that `gather` wrote."""
    runs, notes = read_runs(path)
    if not runs:
        reasons = "".join(f"; {note}" for note in notes)
        raise ValueError(
            f"no results under {str(path)!r}{reasons}; train with: schoenbat lra sweep --out {path}"
        )
    return tabulate(runs, notes)


def tabulate(runs: Iterable[RunResult], notes: Iterable[str] = ()) -> LraTable:
    """Rows of task and attention in the order of the paper and of the registry.

    Runs are averaged only where all settings but the seed agree; of several such groups the one with the most
    steps, then the most seeds, is shown. Times are those of runs that had the device to themselves.
    """
    ordered = sorted(runs, key=_place)
    notes = [*notes]
    timed = _choose_timed([run for run in ordered if run.timing], notes)
    cells = _grouped(ordered, lambda run: (run.record.task, run.record.attention))
    trained = {
        place: _choose_trained([run for run in cell if not run.timing], notes)
        for place, cell in cells.items()
    }
    rows = [_row(place, trained[place], timed) for place in cells if trained[place] or place in timed]
    notes += _differences("trained", {place: chosen[0] for place, chosen in trained.items() if chosen})
    notes += _differences("timed", timed)
    device = next(iter(timed.values())).device if timed else None
    return LraTable(tuple(rows), tuple(_averages(rows)), tuple(dict.fromkeys(notes)), device)


def _place(run: RunResult) -> tuple[Any, ...]:
    """By task, attention, seed; the latest last."""
    record = run.record
    tasks, names = list(TASKS), list(attention_names())
    name = record.attention.partition(":")[0]
    return (
        tasks.index(record.task) if record.task in tasks else len(tasks),
        record.task,
        names.index(name) if name in names else len(names),
        record.attention,
        record.seed,
        run.finished,
    )


def _grouped(runs: Iterable[RunResult], key: Callable[[RunResult], Key]) -> dict[Key, list[RunResult]]:
    groups: dict[Key, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _choose_trained(cell: list[RunResult], notes: list[str]) -> list[RunResult]:
    """The runs of one task and attention that are shown: one of each seed."""
    groups = _grouped(cell, lambda run: run.way)
    if not groups:
        return []
    # Of one seed, the run that finished last.
    seeds = {settings: {run.record.seed: run for run in group} for settings, group in groups.items()}
    shown = max(
        groups, key=lambda settings: (groups[settings][0].record.steps, len(seeds[settings]), settings)
    )
    of = f"of {cell[0].record.task} {cell[0].record.attention}"
    for settings, group in groups.items():
        if settings != shown:
            notes.append(f"left out: {_count(len(group), 'run')} {of} with {_unlike(settings, shown)}")
    repeated = len(groups[shown]) - len(seeds[shown])
    if repeated:
        notes.append(f"left out: {_count(repeated, 'earlier run')} {of} with the same seed")
    return list(seeds[shown].values())


def _choose_timed(timed: list[RunResult], notes: list[str]) -> dict[Place, RunResult]:
    """The timing of every task and attention: undisturbed, all on one device, the latest."""
    alone = [run for run in timed if run.record.alone]
    if len(alone) < len(timed):
        notes.append(f"left out: {_count(len(timed) - len(alone), 'timing')} on a device that was shared")
    devices = _grouped(alone, lambda run: (run.device, run.record.devices))
    if not devices:
        return {}
    shown = max(devices, key=lambda device: (len(devices[device]), device))
    for (name, count), group in devices.items():
        if (name, count) != shown:
            notes.append(f"left out: {_count(len(group), 'timing')} on {count} × {name}")
    return _timed_alike(devices[shown], notes)


def _timed_alike(timed: list[RunResult], notes: list[str]) -> dict[Place, RunResult]:
    """Of each task and attention the latest, of those made as most of the task if there are some."""
    tasks = _grouped(timed, lambda run: run.record.task)
    usual = {task: Counter(run.way for run in runs).most_common(1)[0][0] for task, runs in tasks.items()}
    chosen: dict[Place, RunResult] = {}
    places = _grouped(timed, lambda run: (run.record.task, run.record.attention))
    for (task, attention), runs in places.items():
        shown = max(runs, key=lambda run: (run.way == usual[run.record.task], run.finished))
        chosen[task, attention] = shown
        for way, others in _grouped(runs, lambda run: run.way).items():
            if way != shown.way:
                what = f"{task} {attention} with {_unlike(way, shown.way)}"
                notes.append(f"left out: {_count(len(others), 'timing')} of {what}")
    return chosen


def _differences(how: str, runs: dict[Place, RunResult]) -> Iterator[str]:
    """What makes the attentions of a task unlike to compare."""
    for task in dict.fromkeys(task for task, _ in runs):
        settings = {
            attention: json.loads(run.way) for (place, attention), run in runs.items() if place == task
        }
        for name in _unequal(list(settings.values())):
            values = (f"{one.get(name)} for {attention}" for attention, one in settings.items())
            yield f"{task}: the attentions were not {how} alike, {name} was {', '.join(values)}"


def _unlike(way: str, shown: str) -> str:
    """How runs were made that are left out, where that differs from those that are shown."""
    other, mine = json.loads(way), json.loads(shown)
    return ", ".join(f"{name}={other.get(name)}" for name in _unequal([other, mine]))


def _unequal(settings: Sequence[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]


def _row(place: Place, trained: list[RunResult], timed: dict[Place, RunResult]) -> LraRow:
    task, attention = place
    timing = timed.get(place)
    measured = [run.record for run in ([timing] if timing else trained)]
    best = _tests([run.record.best for run in trained])
    last = _tests([run.record.last for run in trained])
    accuracy = _printed("accuracy", place)
    return LraRow(
        task=task,
        attention=attention,
        seeds=len(trained),
        steps=trained[0].record.steps if trained else None,
        accuracy=Spread.of(best) if best else None,
        last_accuracy=Spread.of(last) if last else None,
        left_chance=mean(test > LEFT_CHANCE for test in best) if best and task == CHANCE_TASK else None,
        majority=measured[0].majority,
        citations=measured[0].citations,
        parameters=measured[0].parameters,
        step_seconds=timing.record.step_seconds if timing else None,
        time_over_naive=_time_over(timing, timed.get((task, NAIVE))),
        time_over_sdpa=_time_over(timing, timed.get((task, SDPA))),
        peak_memory=max((one.peak_memory for one in measured if one.peak_memory is not None), default=None),
        paper_accuracy=None if accuracy is None else round(accuracy / 100, 4),
        paper_time=_printed("time", place),
        paper_memory=_printed("memory", place),
    )


def _tests(accuracies: Iterable[Accuracy | None]) -> list[float]:
    """None of them unless all are known: seeds that are missing are not to be averaged over unseen."""
    tests = [accuracy.test for accuracy in accuracies if accuracy is not None]
    known = [test for test in tests if test is not None]
    return known if len(known) == len(tests) else []


def _printed(quantity: str, place: Place) -> float | None:
    task, attention = place
    return printed(quantity, attention, task) if task in TASKS else None


def _time_over(timing: RunResult | None, reference: RunResult | None) -> float | None:
    """None too where the two were not run alike."""
    if timing is None or reference is None or timing.way != reference.way:
        return None
    own, others = timing.record.step_seconds, reference.record.step_seconds
    return own / others if own and others else None


def _averages(rows: Sequence[LraRow]) -> Iterator[LraRow]:
    """The paper's are computed from its rows, for the four tasks too, of which it prints none."""
    for name, tasks in AVERAGES.items():
        for attention in dict.fromkeys(row.attention for row in rows):
            chosen = [row for row in rows if row.attention == attention and row.task in tasks]
            average = LraRow(
                task=name,
                attention=attention,
                accuracy=_average_spread([row.accuracy for row in chosen], len(tasks)),
                last_accuracy=_average_spread([row.last_accuracy for row in chosen], len(tasks)),
                time_over_naive=_average([row.time_over_naive for row in chosen], len(tasks)),
                time_over_sdpa=_average([row.time_over_sdpa for row in chosen], len(tasks)),
                paper_accuracy=_average([row.paper_accuracy for row in chosen], len(tasks)),
                paper_time=_average([row.paper_time for row in chosen], len(tasks)),
            )
            if average.accuracy or average.last_accuracy or average.time_over_naive or average.time_over_sdpa:
                yield average


def _average(values: Sequence[float | None], count: int) -> float | None:
    """None unless all ``count`` are there."""
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == count else None


def _average_spread(values: Sequence[Spread | None], count: int) -> Spread | None:
    average = _average([value.mean if value else None for value in values], count)
    return None if average is None else Spread(average, None)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
