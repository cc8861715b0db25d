"""The Long Range Arena as the paper prints it: a line for each attention, a column for each task.

Each line of the paper stands above what was measured here of the same attention.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean

from schoenbat.experiments.groups import GROUPS, TASKS, label_of
from schoenbat.report.lra import (
    AVERAGES,
    CHANCE_TASK,
    LEFT_CHANCE,
    NAIVE,
    LraRow,
    LraTable,
    Spread,
)
from schoenbat.report.lra_tables import number, percent
from schoenbat.report.markdown import NOT_MEASURED, table
from schoenbat.report.paper import Figures, ablation, figures, method_of, name_of
from schoenbat.training.record import RunResult

TITLES = {
    "text": "Text",
    "listops": "ListOps",
    "retrieval": "Retrieval",
    "pathfinder": "Pathfinder",
    "image": "Image",
    "average": "average",
    "average without retrieval": "without Retrieval",
}
CLOSE = 3.0
"""Points of accuracy within which rows of one seed are not told apart."""
# The paper prints one row of memory for all kernels; it stands where the first of them does.
SHARED = "memory", "schoenbat:kernel=exp"

Cell = Callable[[LraRow], str | None]
"""What is shown of a row; None where there is nothing to be shown, not even that a figure is missing."""


def shown_as(attention: str) -> str:
    """The name that people read, or the text as code.

    >>> shown_as("softmax:qk_norm=true"), shown_as("mean:causal=both")
    ('softmax, qk-norm', '`mean:causal=both`')
    """
    label = "softmax, scores formed" if attention == NAIVE else label_of(attention)
    return f"`{label}`" if ":" in label else label


def accuracy_table(results: LraTable) -> str:
    """Accuracy on test in percent, its deviation over seeds, and how many seeds learnt Pathfinder."""
    left = f"{TITLES[CHANCE_TASK]} above {100 * LEFT_CHANCE:.0f} %"
    lines = []

    def accuracy(row: LraRow) -> str | None:
        return percent(row.accuracy) if row.accuracy or row.last_accuracy else None

    for attention, line in _lines(results, "accuracy", ".2f", accuracy):
        rows = _rows_of(results, attention)
        lines.append([*line, _left_chance(rows), _seeds(rows), _steps(rows)])
    heading = ["attention", *TITLES.values(), left, "seeds", "steps"]
    for name, quantity in (("most frequent label", "majority"), ("citation count alone", "citations")):
        floors = {row.task: getattr(row, quantity) for row in results.rows}
        if any(share is not None for share in floors.values()):
            cells = [number(floors.get(task), ".2f", 100) for task in TASKS]
            lines.append([f"({name})", *cells, *[""] * (len(heading) - 1 - len(cells))])
    return table(heading, lines)


def own_accuracy_table(results: LraTable) -> str:
    """The same without the paper's lines, and nothing but accuracies."""
    return _table_of_ours(results, lambda row: row.accuracy is not None, lambda row: percent(row.accuracy))


def last_step_table(results: LraTable) -> str:
    """Accuracy on test in percent after the last step, of what was measured here; empty without runs."""
    return _table_of_ours(
        results, lambda row: row.last_accuracy is not None, lambda row: percent(row.last_accuracy)
    )


def time_table(results: LraTable) -> str:
    """Time of a training step over that of softmax with its scores formed, as in the paper."""
    lines = _lines(results, "time", ".3f", lambda row: _known(row.time_over_naive, ".3f"))
    return table(["attention", *TITLES.values()], [line for _, line in lines])


def sdpa_table(results: LraTable) -> str:
    """Milliseconds of a training step, and in brackets how much that is of SDPA's."""
    return _table_of_ours(results, lambda row: row.step_seconds is not None, _beside_sdpa)


def memory_table(results: LraTable) -> str:
    """Peak memory of a training step in MiB beside the paper's MB, and the number of parameters."""
    lines = [
        [*line[: len(TASKS) + 1], _parameters(_rows_of(results, attention))]
        for attention, line in _lines(
            results, "memory", ",.0f", lambda row: _known(row.peak_memory, ",.0f", 2**-20)
        )
    ]
    return table(["attention", *(TITLES[task] for task in TASKS), "parameters"], lines)


def far_from_paper(results: LraTable) -> Iterator[str]:
    """Where an attention that the paper ran is more than `CLOSE` points from what it prints, in words."""
    for task in TASKS:
        far = []
        for row in results.rows:
            spread = row.accuracy or row.last_accuracy
            if row.task == task and spread and row.paper_accuracy and _is_of_paper(row.attention):
                points = 100 * (spread.mean - row.paper_accuracy)
                when = "" if row.accuracy else " (after the last step)"
                far += [f"{shown_as(row.attention)} {points:+.1f}{when}"] if abs(points) > CLOSE else []
        if far:
            yield f"{TITLES[task]}: {', '.join(far)}"


def ablation_table(results: LraTable) -> str:
    """What RMFA and ppSBN each do on Text, by the paper's settings; and what its main table says of the same.

    The settings are the labels of the group ``"ablation"``.
    """
    attentions = GROUPS["ablation"].attentions
    main = {"base": "softmax"} | {
        setting: f"schoenbat:kernel={setting.rpartition(' ')[2]}"
        for setting in ablation()
        if "RMFA + ppSBN" in setting
    }
    lines = []
    for setting in dict.fromkeys((*ablation(), *attentions)):
        rows = [
            row for row in results.rows if row.task == "text" and row.attention == attentions.get(setting)
        ]
        row = rows[0] if rows else LraRow("text", "")
        printed = ablation().get(setting, {})
        lines.append(
            [
                setting,
                percent(row.accuracy),
                number(printed.get("accuracy"), ".2f"),
                number(figures("accuracy")[main[setting]]["text"] if setting in main else None, ".2f"),
                number(row.time_over_naive, ".3f"),
                number(printed.get("time"), ".3f"),
                number(figures("time")[main[setting]]["text"] if setting in main else None, ".3f"),
                _seeds(rows),
            ]
        )
    accuracy = ["ours, %", "paper, %", "paper's main table, %"]
    return table(["setting", *accuracy, "ours, time", "paper, time", "its main table, time", "seeds"], lines)


def identity_table() -> str:
    """The paper's rows of exp and trigh, which are one function: what its figures leave to chance."""
    methods = ("schoenbat:kernel=exp", "schoenbat:kernel=trigh")
    lines = [
        [f"{name_of(method)}, {quantity}", *(format(figures(quantity)[method][t], form) for t in TASKS)]
        for quantity, form in (("accuracy", ".2f"), ("time", ".3f"))
        for method in methods
    ]
    return table(["as the paper prints it", *(TITLES[task] for task in TASKS)], lines)


def tuning_table(runs: Iterable[RunResult]) -> str:
    """Validation accuracy in percent of every attention that was tried, those that failed to learn too.

    Runs of one line differ in their seed alone; what else was changed stands beside the attention.
    """
    tried = _latest(run for run in runs if run.record.best)
    changed = _changed(tried)
    lines: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for run in tried:
        said = json.loads(run.way)
        settings = (f"{name} {said[name]}" for name in changed if name in said)
        line = run.record.attention, ", ".join(settings), f"{run.record.steps:,}"
        if run.record.best is not None:
            lines.setdefault(line, {}).setdefault(run.record.task, []).append(run.record.best.validation)
    return table(
        ["attention", *(["settings"] if changed else []), "steps", *(TITLES[task] for task in TASKS)],
        [
            [
                _named(attention),
                *([settings] if changed else []),
                steps,
                *(percent(Spread.of(found[task]) if task in found else None) for task in TASKS),
            ]
            for (attention, settings, steps), found in lines.items()
        ],
    )


def _named(attention: str) -> str:
    """What was tried, and how it is spelt."""
    labels = {text: label for label, text in GROUPS["tuning"].attentions.items()}
    return f"{labels[attention]}: `{attention}`" if attention in labels else f"`{attention}`"


def _latest(runs: Iterable[RunResult]) -> list[RunResult]:
    """Of runs that were made alike, with one seed, the one that finished last."""
    found: dict[tuple[str, str, int], RunResult] = {}
    for run in runs:
        key = run.record.attention, run.way, run.record.seed
        if key not in found or run.finished >= found[key].finished:
            found[key] = run
    return list(found.values())


def _changed(runs: Sequence[RunResult]) -> list[str]:
    """What runs of one task and as many steps, which have a column of their own, differ in."""
    changed = []
    for task, steps in dict.fromkeys((run.record.task, run.record.steps) for run in runs):
        ways = [json.loads(run.way) for run in runs if (run.record.task, run.record.steps) == (task, steps)]
        for name in dict.fromkeys(name for one in ways for name in one):
            if len({str(one.get(name)) for one in ways}) > 1:
                changed.append(name)
    return list(dict.fromkeys(changed))


def _lines(results: LraTable, quantity: str, form: str, ours: Cell) -> Iterator[tuple[str, list[str]]]:
    """Attention and cells; the paper's lines belong to no attention and are in italics."""
    measured = _attentions(results)
    for method in (*figures("accuracy"), None):
        if method is not None and method in _printed(quantity):
            printed = _printed(quantity)[method]
            cells = [f"*{format(printed[task], form)}*" if task in printed else "" for task in TITLES]
            name = "SchoenbAt, any kernel" if (quantity, method) == SHARED else name_of(method)
            yield "", [f"*{name}, paper*", *cells]
        for attention in measured:
            if method_of(attention) == method:
                rows = {row.task: ours(row) for row in _rows_of(results, attention)}
                if any(cell is not None for cell in rows.values()):
                    yield attention, [shown_as(attention), *(rows.get(t) or NOT_MEASURED for t in TITLES)]


def _table_of_ours(
    results: LraTable, is_measured: Callable[[LraRow], bool], cell: Callable[[LraRow], str]
) -> str:
    """The attentions of which some row is measured, without the paper's; empty where there is none."""
    lines = []
    for attention in _attentions(results):
        rows = {row.task: row for row in _rows_of(results, attention)}
        if any(map(is_measured, rows.values())):
            cells = (cell(rows[task]) if task in rows else NOT_MEASURED for task in TITLES)
            lines.append([shown_as(attention), *cells])
    return table(["attention", *TITLES.values()], lines) if lines else ""


def _known(value: float | None, form: str, factor: float = 1.0) -> str | None:
    return None if value is None else number(value, form, factor)


def _is_of_paper(attention: str) -> bool:
    """Whether an attention is what a row of the paper was measured with, and not one that mends it."""
    if attention.partition(":")[0] == "schoenbat":
        return attention in GROUPS["paper"].attentions.values()
    return attention == method_of(attention)


def _printed(quantity: str) -> Figures:
    """The paper's table, with the average of four tasks that it does not print."""
    tables = figures(quantity)
    if quantity == "memory":
        return {"softmax": tables["softmax"], SHARED[1]: tables["schoenbat"]}
    name, tasks = list(AVERAGES.items())[1]
    return {method: row | {name: mean(row[task] for task in tasks)} for method, row in tables.items()}


def _attentions(results: LraTable) -> list[str]:
    """In the order of the groups, then of the registry."""
    known = [text for group in GROUPS.values() for text in group.attentions.values()]
    found = list(dict.fromkeys(row.attention for row in results.rows))
    return sorted(found, key=lambda text: known.index(text) if text in known else len(known))


def _rows_of(results: LraTable, attention: str) -> list[LraRow]:
    return [row for row in (*results.rows, *results.averages) if row.attention == attention]


def _left_chance(rows: Sequence[LraRow]) -> str:
    for row in rows:
        if row.left_chance is not None:
            return f"{round(row.left_chance * row.seeds)} of {row.seeds}"
    return ""


def _seeds(rows: Sequence[LraRow]) -> str:
    return _span([row.seeds for row in rows if row.task in TASKS and row.seeds])


def _steps(rows: Sequence[LraRow]) -> str:
    return _span([row.steps for row in rows if row.steps])


def _parameters(rows: Sequence[LraRow]) -> str:
    return _span([row.parameters for row in rows if row.parameters])


def _span(values: Sequence[int]) -> str:
    """
    >>> _span([3, 1, 3]), _span([2, 2]), _span([])
    ('1–3', '2', '')
    """
    return "–".join(f"{value:,}" for value in dict.fromkeys((min(values), max(values)))) if values else ""


def _beside_sdpa(row: LraRow) -> str:
    if row.time_over_sdpa is None:
        return NOT_MEASURED
    if row.step_seconds is None:
        return f"({row.time_over_sdpa:.2f})"
    return f"{1e3 * row.step_seconds:.2f} ({row.time_over_sdpa:.2f})"
