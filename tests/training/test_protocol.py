"""The published settings and the schedule."""

import pytest
import torch

from schoenbat.data import task_names
from schoenbat.training.protocol import Protocol


@pytest.mark.parametrize("task", task_names())
@pytest.mark.parametrize("steps", [500, 10_000])
def test_the_schedule_is_torchs_linear_one_cycle(task, steps):
    protocol = Protocol.paper(task, steps=steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        protocol.learning_rate,
        total_steps=steps,
        pct_start=protocol.warmup / steps,
        anneal_strategy="linear",
        cycle_momentum=False,
    )
    for step in range(steps):
        assert protocol.learning_rate_at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        if step < steps - 1:
            schedule.step()


def test_the_table_of_the_paper():
    table = {
        task: (p.batch_size, p.learning_rate, p.warmup, p.evaluate_every, p.embedding_rows, p.steps)
        for task in task_names()
        for p in [Protocol.paper(task)]
    }
    assert table == {
        "listops": (32, 1e-4, 1000, 500, 32, 10_000),
        "text": (32, 1e-4, 80, 500, 512, 10_000),
        "retrieval": (16, 2e-4, 800, 1000, 512, 10_000),
        "pathfinder": (128, 2e-4, 312, 500, 512, 10_000),
        "image": (256, 1e-4, 175, 500, 256, 10_000),
    }


def test_fewer_steps_shorten_the_warmup_unless_it_is_given():
    assert Protocol.paper("listops", steps=200).warmup == 20
    assert Protocol.paper("listops", steps=200, warmup=7).warmup == 7
    assert Protocol.paper("listops", steps=200).evaluate_every == 200


def test_what_is_selected_lies_in_the_last_four_fifths():
    protocol = Protocol.paper("text", steps=100)
    assert [step for step in (10, 19, 20, 100) if protocol.selects(step)] == [20, 100]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps": 1}, "at least 2 steps"),
        ({"steps": 1e305}, "steps is an integer, got 1e"),
        ({"steps": 100, "warmup": 100}, "warmup=100"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": -1.0}, "learning_rate is above 0, got -1.0"),
    ],
)
def test_impossible_settings_are_named(changes, problem):
    with pytest.raises(ValueError, match=problem):
        Protocol.paper("text", **changes)


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match="unknown task 'texts'; known are listops"):
        Protocol.paper("texts")
