"""The paper's figures: copied without a slip, and found by the registry's names."""

import statistics

import pytest

from schoenbat.experiments.groups import TASKS
from schoenbat.registry import attention_names, build_attention
from schoenbat.report.paper import figures, printed

KERNELS = ("exp", "inv", "logi", "trigh", "sqrt")


@pytest.mark.parametrize(
    ("quantity", "attention", "task", "figure"),
    [
        ("accuracy", "softmax", "text", 63.31),
        ("accuracy", "softmax:naive=true", "image", 38.69),
        ("accuracy", "performer", "listops", 18.80),
        ("accuracy", "schoenbat", "pathfinder", 72.35),
        ("accuracy", "schoenbat:construction=paper,kernel=sqrt", "retrieval", 79.36),
        ("accuracy", "schoenbat:kernel=trigh", "average", 56.92),
        ("time", "informer", "pathfinder", 1.021),
        ("time", "schoenbat:kernel=exp", "text", 0.076),
        ("time", "bigbird", "average", 0.603),
        ("memory", "softmax", "text", 18092),
        ("memory", "schoenbat:kernel=logi", "image", 3636),
    ],
)
def test_figures_are_those_of_the_tables(quantity, attention, task, figure):
    assert printed(quantity, attention, task) == figure


@pytest.mark.parametrize("attention", ["mean", "none", "schoenbat:kernel=cosh"])
@pytest.mark.parametrize("quantity", ["accuracy", "time", "memory"])
def test_what_the_paper_has_not_measured_is_none(quantity, attention):
    assert printed(quantity, attention, "text") is None


def test_memory_was_printed_for_two_methods():
    assert printed("memory", "rfa", "text") is None


def test_an_unknown_table_is_named():
    with pytest.raises(ValueError, match="no table of 'speed'; it has accuracy, time, memory"):
        figures("speed")


def test_every_row_has_every_task_and_a_name_that_the_registry_knows():
    methods = {
        *(set(attention_names()) - {"mean", "none", "schoenbat"}),
        *(f"schoenbat:kernel={kernel}" for kernel in KERNELS),
    }
    assert set(figures("accuracy")) == set(figures("time")) == methods
    for quantity in ("accuracy", "time", "memory"):
        for method, row in figures(quantity).items():
            assert tuple(row) == (*TASKS, "average")
            build_attention(method, head_dim=32, num_heads=2, max_length=64)


# Rounded to nearest like the others, these eight would be one higher in their last digit.
CUT_OFF = {
    ("accuracy", "softmax"): 56.596,
    ("accuracy", "reformer"): 49.926,
    ("accuracy", "informer"): 48.218,
    ("accuracy", "cosformer"): 49.328,
    ("accuracy", "performer"): 48.126,
    ("accuracy", "schoenbat:kernel=sqrt"): 58.616,
    ("time", "bigbird"): 0.6036,
    ("time", "performer"): 0.4266,
}


@pytest.mark.parametrize(("quantity", "digit"), [("accuracy", 0.01), ("time", 0.001), ("memory", 1)])
def test_printed_averages_are_those_of_the_rows(quantity, digit):
    """A digit that slipped in copying would move the average of its row."""
    unequal = {}
    for method, row in figures(quantity).items():
        average = statistics.mean(row[task] for task in TASKS)
        assert abs(average - row["average"]) < digit
        if abs(average - row["average"]) > 0.51 * digit:
            unequal[quantity, method] = pytest.approx(average)
    assert unequal == {key: average for key, average in CUT_OFF.items() if key[0] == quantity}
