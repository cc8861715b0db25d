"""The Long Range Arena, a line for each attention: ours below the paper's, nothing that was not run."""

import re
from dataclasses import replace

import pytest
from run_records import run, timing

from schoenbat.experiments.groups import GROUPS, TASKS
from schoenbat.report import arena
from schoenbat.report.lra import NAIVE, tabulate
from schoenbat.training.record import Accuracy


def cells_of(table, name):
    """The cells of the one line that begins with a name."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_without_runs_the_paper_stands_alone():
    shown = arena.accuracy_table(tabulate([]))
    assert cells_of(shown, "*Softmax, paper*")[:6] == [
        "*63.31*",
        "*37.30*",
        "*75.04*",
        "*68.64*",
        "*38.69*",
        "*56.59*",
    ]
    assert len(shown.splitlines()) == 2 + 14
    assert "±" not in shown


def test_the_average_of_four_tasks_is_computed():
    shown = arena.accuracy_table(tabulate([]))
    four = (63.31 + 37.30 + 68.64 + 38.69) / 4
    assert cells_of(shown, "*Softmax, paper*")[6] == f"*{four:.2f}*"


def test_ours_stands_below_the_papers_line():
    code = GROUPS["paper"].attentions["SchoenbAt, the paper's code"]
    runs = [run(test, seed=seed) for seed, test in enumerate((0.6, 0.62, 0.67))]
    lines = arena.accuracy_table(tabulate([*runs, run(0.5, attention=code)])).splitlines()
    starts = [line.split("|")[1].strip() for line in lines]
    assert starts[starts.index("softmax") - 1] == "*Softmax, paper*"
    assert starts[starts.index("SchoenbAt, the paper's code") - 1] == "*SchoenbAt exp, paper*"
    cells = cells_of("\n".join(lines), "softmax")
    assert cells == ["63.00 ± 3.61", "–", "–", "–", "–", "–", "–", "", "3", "10,000"]


def test_seeds_that_left_chance_are_counted():
    runs = [run(test, task="pathfinder", seed=seed) for seed, test in enumerate((0.5, 0.51, 0.7))]
    assert cells_of(arena.accuracy_table(tabulate(runs)), "softmax")[-3:-1] == ["1 of 3", "3"]


def test_a_test_that_is_not_known_is_an_empty_cell_and_the_last_step_is_shown():
    last = Accuracy(10_000, 0.65, 0.7)
    runs = [run(None, task="pathfinder", last=last), run(0.6, task="pathfinder", seed=1, last=last), run()]
    results = tabulate(runs)
    assert cells_of(arena.accuracy_table(results), "softmax")[:5] == ["60.00", "–", "–", "–", "–"]
    assert cells_of(arena.accuracy_table(results), "softmax")[-3] == ""
    assert list(arena.far_from_paper(tabulate([run(None, last=last)]))) == [
        "Text: softmax +6.7 (after the last step)"
    ]
    shown = arena.accuracy_table(tabulate([run(None, last=last)]))
    assert cells_of(shown, "softmax")[:2] == ["–", "–"]
    assert cells_of(arena.last_step_table(results), "softmax")[:4] == ["50.00", "–", "–", "70.00 ± 0.00"]


def test_without_runs_nothing_stands_after_the_last_step():
    assert arena.last_step_table(tabulate([timing(10.0)])) == ""


def test_seeds_and_steps_that_differ_between_tasks_are_a_span():
    runs = [run(), *(run(task="listops", seed=seed, steps=2500) for seed in range(3))]
    assert cells_of(arena.accuracy_table(tabulate(runs)), "softmax")[-2:] == ["1–3", "2,500–10,000"]


def test_floors_are_lines():
    runs = [run(task="retrieval", citations=0.73), run(majority=0.51)]
    shown = arena.accuracy_table(tabulate(runs))
    assert cells_of(shown, "(most frequent label)")[:3] == ["51.00", "–", "50.00"]
    assert cells_of(shown, "(citation count alone)")[:3] == ["–", "–", "73.00"]


def test_own_accuracies_stand_alone():
    runs = [run(0.60), run(0.66, seed=1), run(0.7, task="image"), timing(10.0, attention=NAIVE)]
    _, _, *lines = arena.own_accuracy_table(tabulate(runs)).splitlines()
    (line,) = lines  # neither the paper's, nor one of what was only timed
    assert cells_of(line, "softmax")[0] == "63.00 ± 4.24"


def test_times_are_over_softmax_with_its_scores_and_over_sdpa():
    runs = [
        timing(10.0),
        timing(40.0, attention=NAIVE),
        timing(5.0, attention=GROUPS["main"].attentions["SchoenbAt tuned"]),
    ]
    results = tabulate(runs)
    assert cells_of(arena.time_table(results), "SchoenbAt tuned")[0] == "0.125"
    assert cells_of(arena.sdpa_table(results), "SchoenbAt tuned")[0] == "5.00 (0.50)"
    assert cells_of(arena.time_table(results), "*SchoenbAt exp, paper*")[0] == "*0.076*"


def test_memory_has_one_line_of_the_paper_for_all_kernels():
    shown = arena.memory_table(tabulate([run(parameters=80_000), run(task="image")]))
    assert cells_of(shown, "*SchoenbAt, any kernel, paper*")[0] == "*4,452*"
    assert cells_of(shown, "softmax") == ["3", "–", "–", "–", "3", "76,000–80,000"]


def test_only_what_the_paper_ran_is_far_from_it():
    text = GROUPS["paper"].attentions["SchoenbAt, the paper's text"]
    attentions = ("softmax", "softmax:qk_norm=true", "schoenbat", "performer", text)
    results = tabulate([run(0.70, attention=attention) for attention in attentions])
    (line,) = arena.far_from_paper(results)
    assert line == "Text: softmax +6.7, Performer +6.2, SchoenbAt, the paper's text +5.9"
    assert not list(arena.far_from_paper(tabulate([run(0.65)])))


def test_ablation_stands_beside_both_tables_of_the_paper():
    both = GROUPS["ablation"].attentions["base + RMFA + ppSBN, exp"]
    runs = [run(0.65), run(0.66, attention=both), timing(40.0, attention=NAIVE), timing(10.0, attention=both)]
    shown = arena.ablation_table(tabulate(runs))
    assert cells_of(shown, "base") == ["65.00", "65.58", "63.31", "–", "1.000", "1.000", "1"]
    assert cells_of(shown, "base + RMFA + ppSBN, exp") == [
        "66.00",
        "71.54",
        "64.12",
        "0.250",
        "0.230",
        "0.076",
        "1",
    ]
    assert cells_of(shown, "base + ppSBN") == ["–", "65.10", "–", "–", "0.785", "–", ""]
    assert len(shown.splitlines()) == 2 + 12


def test_labels_of_the_ablation_are_those_of_the_papers_table():
    assert len(arena.ablation_table(tabulate([])).splitlines()) == 2 + len(GROUPS["ablation"].attentions)


def test_the_rows_that_are_one_function():
    assert cells_of(arena.identity_table(), "SchoenbAt trigh, time")[2] == "0.533"


def test_everything_that_was_tried_is_shown():
    runs = [
        run(validation=0.4, task="listops", steps=2500),
        run(validation=0.38, task="listops", steps=2500, seed=1),
        run(validation=0.5, task="image", steps=2500),
        run(validation=0.1, task="listops", attention="schoenbat:scale=8.0", steps=500),
    ]
    lines = arena.tuning_table(runs).splitlines()
    assert lines[0] == "| attention | steps | Text | ListOps | Retrieval | Pathfinder | Image |"
    assert lines[2] == "| `softmax` | 2,500 | – | 39.00 ± 1.41 | – | – | 50.00 |"
    assert lines[3] == "| SchoenbAt, scale 8: `schoenbat:scale=8.0` | 500 | – | 10.00 | – | – | – |"


def test_settings_that_were_tried_are_named_and_not_averaged():
    runs = [run(settings={"learning_rate": rate}, validation=rate) for rate in (0.1, 0.2)]
    lines = arena.tuning_table(runs).splitlines()
    assert lines[2].startswith("| `softmax` | learning_rate 0.1 | 10,000 | 10.00 |")
    assert lines[3].startswith("| `softmax` | learning_rate 0.2 | 10,000 | 20.00 |")


@pytest.mark.parametrize("changes", [{"settings": {"warmup": 1}}, {"data": "of another day"}])
def test_runs_that_differ_in_more_than_their_seed_are_not_averaged(changes):
    runs = [run(validation=0.3, settings={"warmup": 44}), run(validation=0.5, **changes)]
    lines = arena.tuning_table(runs).splitlines()[2:]
    assert [line.split("|")[4].strip() for line in lines] == ["30.00", "50.00"]


def test_of_one_seed_the_latest_run_is_shown():
    runs = [
        replace(run(validation=validation), finished=day)
        for validation, day in ((0.5, "2026-01-02"), (0.3, "2026-01-01"))
    ]
    assert arena.tuning_table(runs).splitlines()[2].startswith("| `softmax` | 10,000 | 50.00 |")


@pytest.mark.parametrize("show", [arena.accuracy_table, arena.time_table, arena.memory_table])
def test_lines_are_as_long_as_their_heading(show):
    runs = [
        make(task=task, attention=attention)
        for task in TASKS
        for attention in ("softmax", NAIVE, "schoenbat", "mean", "schoenbat:kernel=(2+x)**2")
        for make in (run, lambda **more: timing(3.0, **more))
    ]
    lines = show(tabulate(runs)).splitlines()
    assert len({len(re.findall(r"\|", line)) for line in lines}) == 1
