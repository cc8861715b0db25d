"""The table of the Long Range Arena: what is averaged, what is left out, and that it can be read."""

import io
import json
from dataclasses import asdict, replace

import pytest
import run_records
from rich.console import Console

from schoenbat.experiments.groups import TASKS, find_group
from schoenbat.registry import attention_names
from schoenbat.report.lra import NAIVE, SDPA, collect, tabulate
from schoenbat.report.lra_tables import accuracy_table, cost_table, markdown
from schoenbat.report.results import write_results
from schoenbat.training.record import Accuracy, RunResult, run_directory

RECORD = replace(run_records.RECORD, steps=100, best=Accuracy(80, 0.7, 0.6), last=Accuracy(100, 0.65, 0.5))


def run(test=0.6, *, device="H200", finished="2026-01-01", protocol=None, **more):
    record = replace(RECORD, best=Accuracy(80, 0.7, test), **more)
    settings = {"steps": record.steps, "batch_size": 32} | (protocol or {})
    options = {"task": record.task, "seed": record.seed, "alone": record.alone, "protocol": settings}
    return RunResult(record, options, device, finished)


def timing(milliseconds, **more):
    timed = run(**{"seconds": milliseconds / 5, **more})
    return replace(timed, record=replace(timed.record, best=None, last=None, steps=210))


def everything():
    attentions = (*attention_names(), NAIVE, "schoenbat:kernel=inv,construction=paper,causal=true")
    return [
        make(task=task, attention=attention, steps=10_000)
        for task in TASKS
        for attention in attentions
        for make in (run, lambda **more: run(0.61, seed=1, **more), lambda **more: timing(12.0, **more))
    ]


def shown(table, width=100):
    text = io.StringIO()
    Console(file=text, width=width).print(accuracy_table(table), cost_table(table))
    return text.getvalue()


def test_accuracy_is_the_mean_over_seeds_with_the_sample_deviation():
    (row,) = tabulate([run(test, seed=seed) for seed, test in enumerate((0.6, 0.62, 0.67))]).rows
    assert row.accuracy.mean == pytest.approx(0.63)
    assert row.accuracy.deviation == pytest.approx(0.036056, abs=1e-6)
    assert (row.last_accuracy.mean, row.last_accuracy.deviation) == (0.5, 0.0)
    assert (row.seeds, row.steps, row.majority, row.parameters) == (3, 100, 0.5, 76_000)


def test_one_seed_has_no_deviation():
    table = tabulate([run()])
    assert table.rows[0].accuracy.deviation is None
    assert "60.00" in shown(table)
    assert "±" not in shown(table).split("test:")[0]


def test_the_paper_stands_beside():
    rows = tabulate([run(), run(attention="mean"), run(attention="schoenbat:causal=true,kernel=inv")]).rows
    assert [row.paper_accuracy for row in rows] == [0.6331, 0.6354, None]
    assert [row.paper_time for row in rows] == [1.0, 0.209, None]
    assert [row.paper_memory for row in rows] == [18092, 4452, None]
    assert "-3.31" in shown(tabulate([run()]))


def test_a_task_that_the_paper_has_not_is_shown_without_it():
    (row,) = tabulate([run(task="translation")]).rows
    assert row.paper_accuracy is None


def test_rows_are_in_the_order_of_paper_and_registry():
    names = ["rfa", "softmax", "schoenbat:kernel=inv", "schoenbat"]
    rows = tabulate([run(task=task, attention=name) for task in ("image", "text") for name in names]).rows
    assert [row.task for row in rows] == ["text"] * 4 + ["image"] * 4
    assert [row.attention for row in rows[:4]] == ["softmax", "rfa", "schoenbat", "schoenbat:kernel=inv"]


def test_runs_of_other_options_are_not_averaged():
    runs = [
        run(0.9, seed=0, steps=50),
        run(0.9, seed=1, steps=50),
        run(0.6, seed=0, steps=100),
        run(0.9, seed=1, steps=100, protocol={"batch_size": 16}),
        run(0.7, seed=2, steps=100),
    ]
    table = tabulate(runs)
    assert table.rows[0].accuracy.mean == pytest.approx(0.65)
    assert table.rows[0].seeds == 2
    assert set(table.notes) == {
        "left out: 2 runs of text softmax with steps=50",
        "left out: 1 run of text softmax with batch_size=16",
    }


def test_other_data_are_other_options():
    table = tabulate([run(seed=0), run(seed=1), run(0.9, seed=2, data="other")])
    assert table.rows[0].seeds == 2
    assert table.notes == ("left out: 1 run of text softmax with data=other",)


def test_a_seed_counts_once():
    table = tabulate([run(0.9, finished="2026-01-01"), run(0.6, finished="2026-01-02")])
    assert table.rows[0].seeds == 1
    assert table.rows[0].accuracy.mean == 0.6
    assert table.notes == ("left out: 1 earlier run of text softmax with the same seed",)


def test_attentions_that_were_trained_unlike_are_told():
    table = tabulate([run(steps=100), run(attention="rfa", steps=50)])
    assert table.notes == (
        "text: the attentions were not trained alike, steps was 100 for softmax, 50 for rfa",
    )


def test_times_are_over_those_of_both_softmax_of_the_same_task():
    runs = [timing(12.0, attention=NAIVE), timing(4.0, attention=SDPA), timing(3.0, attention="rfa")]
    table = tabulate([*runs, timing(5.0, attention="rfa", task="image"), run(attention="rfa", seconds=99.0)])
    rows = {(row.task, row.attention): row for row in table.rows}
    rfa = rows["text", "rfa"]
    assert (rfa.step_seconds, rfa.time_over_naive, rfa.time_over_sdpa) == pytest.approx((0.003, 0.25, 0.75))
    assert rows["text", NAIVE].time_over_naive == 1.0
    assert rows["image", "rfa"].time_over_naive is None
    assert rows["image", "rfa"].accuracy is None
    assert table.timed_on == "H200"


def test_only_timings_on_one_device_without_company_count():
    runs = [timing(12.0, attention=NAIVE), timing(3.0, attention="rfa")]
    disturbed = timing(1.0, attention="rfa", alone=False, finished="2027")
    elsewhere = timing(1.0, attention="rfa", device="toaster", finished="2027")
    table = tabulate([*runs, disturbed, elsewhere])
    assert table.rows[1].time_over_naive == pytest.approx(0.25)
    assert set(table.notes) == {
        "left out: 1 timing on a device that was shared",
        "left out: 1 timing on 1 × toaster",
    }


def test_runs_that_were_trained_and_not_timed_give_no_times():
    (row,) = tabulate([run(attention=SDPA)]).rows
    assert row.step_seconds is None
    assert row.peak_memory == 3 * 2**20
    assert "times are those of runs with --timing" in " ".join(shown(tabulate([run()]), width=80).split())


def test_timings_of_unlike_settings_have_no_ratio():
    table = tabulate([timing(4.0), timing(3.0, attention="rfa", protocol={"batch_size": 16})])
    assert table.rows[1].time_over_sdpa is None
    assert table.notes == (
        "text: the attentions were not timed alike, batch_size was 32 for softmax, 16 for rfa",
    )


def test_averages_need_all_tasks():
    runs = [run(0.1 * index, task=task) for index, task in enumerate(TASKS, start=4)]
    averages = tabulate(runs).averages
    assert [row.task for row in averages] == ["average", "average without retrieval"]
    assert [row.accuracy.mean for row in averages] == pytest.approx([0.6, 0.6])
    assert averages[0].paper_accuracy == pytest.approx(0.56596)
    assert averages[1].paper_accuracy == pytest.approx((63.31 + 37.30 + 68.64 + 38.69) / 400)
    without_retrieval = [one for one in runs if one.record.task != "retrieval"]
    assert [row.task for row in tabulate(without_retrieval).averages] == ["average without retrieval"]
    assert not tabulate(runs[:3]).averages


def test_pathfinder_tells_how_many_seeds_left_chance():
    runs = [run(test, seed=seed, task="pathfinder") for seed, test in enumerate((0.5, 0.55, 0.72, 0.8))]
    table = tabulate([*runs, run()])
    assert [row.left_chance for row in table.rows] == [None, 0.5]


def test_tables_fit_80_columns_and_cut_nothing_off():
    table = tabulate(everything())
    text = shown(table, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for words in (
        "60.50 ± 0.71",
        "pathfinder",
        "(most frequent label)",
        "without",
        "18,092",
        "0.076",
    ):
        assert words in text
    assert "76,000" in markdown(table)


@pytest.mark.parametrize("group", ["main", "paper", "peers", "kernels"])
def test_every_attention_of_a_group_has_one_line_of_80_columns(group):
    attentions = find_group(group).attentions
    makers = run, lambda **more: run(0.61, seed=1, **more), lambda **more: timing(12.0, **more)
    runs = [make(attention=text, steps=10_000) for text in attentions.values() for make in makers]
    lines = shown(tabulate(runs), width=80).splitlines()
    for label in attentions:
        accuracy, cost = (line for line in lines if line.split("  ")[1:2] == [label])
        assert "60.50 ± 0.71" in accuracy
        assert "12.00" in cost
    assert "schoenbat:" not in "".join(lines)


def test_an_attention_without_a_name_breaks_between_its_options():
    text = "schoenbat:causal=both,construction=exact-low,kernel=(1+x)**3,num_features=64"
    lines = shown(tabulate([run(attention=text)]), width=80).splitlines()
    assert any("60.00" in line and "schoenbat:causal=both," in line for line in lines)
    assert any(line.strip() == "kernel=(1+x)**3, num_features=64" for line in lines)


def test_markdown_has_both_tables_and_the_notes():
    text = markdown(tabulate([*everything(), run(steps=7)]))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {10}
    assert text.count("\n## ") + text.startswith("## ") == 2
    assert "- left out: 1 run of text softmax with steps=7" in text
    assert "| text | softmax | 2 | 10,000 | 60.50 ± 0.71 | 50.00 ± 0.00 |" in text


def write(directory, result, timed=False):
    record = result.record
    path = run_directory(directory, record.task, record.attention, record.seed, timing=timed) / "result.json"
    write_results(path, "lra-train", result.options, [record])
    return path


def test_results_are_read_from_files(tmp_path):
    results = [run(0.6), run(0.7, seed=1), run(attention="schoenbat:kernel=inv,causal=true")]
    for result in results:
        write(tmp_path, result)
    write(tmp_path, timing(3.0), timed=True)
    damaged = write(tmp_path, run(seed=2))
    damaged.write_text('{"experiment": "lra-')
    table = collect(tmp_path)
    assert [(row.attention, row.seeds) for row in table.rows] == [
        ("softmax", 2),
        ("schoenbat:kernel=inv,causal=true", 1),
    ]
    assert table.rows[0].step_seconds == pytest.approx(0.003)
    (note,) = table.notes
    assert note.startswith(f"left out: {damaged} is not the result of a run")
    json.dumps([asdict(row) for row in table.rows])


def test_a_directory_without_results_is_explained(tmp_path):
    with pytest.raises(ValueError, match=r"no results under .* train with: schoenbat lra sweep"):
        collect(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no results under .*; left out: .*result.json is not the result"):
        collect(tmp_path)
    with pytest.raises(
        ValueError, match=r"there is no .*nowhere, neither .*; train with: schoenbat lra sweep"
    ):
        collect(tmp_path / "nowhere")


def test_of_several_timings_the_latest_is_shown_whatever_its_seed():
    old = replace(timing(990.0, seed=1), finished="2020-01-01")
    assert tabulate([old, timing(10.0)]).rows[0].step_seconds == pytest.approx(0.01)


def test_a_timing_unlike_those_of_other_attentions_is_left_out_and_named():
    def timed(milliseconds, attention, batch_size, day):
        options = {"task": "text", "batch_size": batch_size}
        return replace(timing(milliseconds, attention=attention), options=options, finished=day)

    runs = [timed(20.0, "rfa", 32, "2026-01-01"), timed(10.0, "softmax", 32, "2026-01-01")]
    table = tabulate([*runs, timed(1.0, "softmax", 4, "2026-01-02")])
    assert {row.attention: row.step_seconds for row in table.rows} == pytest.approx(
        {"softmax": 0.01, "rfa": 0.02}
    )
    assert table.notes == ("left out: 1 timing of text softmax with batch_size=4",)
