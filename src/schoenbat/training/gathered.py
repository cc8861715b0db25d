"""The results of many runs in one file, which is small enough to be kept with the code."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from schoenbat.files import one_at_a_time, write_atomically
from schoenbat.training.record import EXPERIMENT, RESULT, RunResult, parse_result, read_result

GATHERED = f"{EXPERIMENT}-runs"


def read_runs(path: Path) -> tuple[list[RunResult], list[str]]:
    """All runs under a directory or in a gathered file, and what could not be read, in sentences."""
    if not path.exists():
        raise ValueError(
            f"there is no {path}, neither a directory of runs nor a file by 'lra gather'; "
            "train with: schoenbat lra sweep"
        )
    if path.is_file():
        return [parse_result(content) for content in _contents(path)], []
    return _read_directory(path)


def gather(runs: Path, file: Path) -> tuple[int, int]:
    """Add the results of all runs to ``file``: how many were added, how many it now has.

    ``runs`` is a directory, or a file of gathered runs, such as another machine's. Of two results of one
    task, attention, seed and way of training the one that finished last is kept.
    """
    found = (
        list(_contents(runs)) if runs.is_file() else [_content(path) for path in sorted(runs.rglob(RESULT))]
    )
    if not found:
        raise ValueError(f"there are no results under {runs}; train with: schoenbat lra sweep")
    with one_at_a_time(file.parent):
        kept = {_identity(content): content for content in (_contents(file) if file.exists() else [])}
        before = set(map(_text, kept.values()))
        for content in found:
            other = kept.get(_identity(content))
            if other is None or other["finished"] <= content["finished"]:
                kept[_identity(content)] = content
        # A run a line: what a further run changes is then a line, too.
        lines = ",\n".join(_text(kept[identity]) for identity in sorted(kept))
        write_atomically(file, f'{{"experiment": "{GATHERED}", "runs": [\n{lines}\n]}}\n')
    return len(set(map(_text, kept.values())) - before), len(kept)


def _read_directory(directory: Path) -> tuple[list[RunResult], list[str]]:
    runs, notes = [], []
    for path in sorted(directory.rglob(RESULT)):
        try:
            runs.append(read_result(path))
        except ValueError as error:
            notes.append(f"left out: {error}")
    return runs, notes


def _content(path: Path) -> dict[str, Any]:
    """One run's result, as it is written."""
    try:
        read_result(path)
    except ValueError as error:
        raise ValueError(f"{error}; delete it, and the sweep trains that run again") from error
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _contents(file: Path) -> Iterable[dict[str, Any]]:
    try:
        gathered = json.loads(file.read_text(encoding="utf-8"))
        if gathered["experiment"] != GATHERED:
            raise ValueError(f"its experiment is {gathered['experiment']!r}, not {GATHERED!r}")
        for content in gathered["runs"]:
            parse_result(content)
        return gathered["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not hold the results of runs: {error!r}") from error


def _identity(content: dict[str, Any]) -> tuple[str, ...]:
    run = parse_result(content)
    record = run.record
    kind = "timing" if run.timing else "trained"
    return record.task, record.attention, kind, f"{record.seed:06}", run.device, run.way


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True)
