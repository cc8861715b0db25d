"""Which runs a sweep has, and how each is called."""

import pytest
import torch
from run_records import run

from schoenbat.training.cells import Cell, SweepOptions, is_known, parse_train_option, train_command


@pytest.fixture
def options(tmp_path):
    def make(tasks=("text",), attentions=("softmax",), **more):
        more = {"train_options": (("steps", "100"),)} | more
        return SweepOptions(tasks, attentions, out=tmp_path / "runs", data=tmp_path, **more)

    return make


@pytest.mark.parametrize("text", ["steps", "steps=", "=3", "", "compile=true"])
def test_a_train_option_without_name_or_value_is_explained(text):
    with pytest.raises(ValueError, match="as in steps=1000, nor compile, no-compile or keep-zeros"):
        parse_train_option(text)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"tasks": ("txt",)}, "unknown task 'txt'"),
        ({"attentions": ("sofmax",)}, "unknown attention 'sofmax'"),
        ({"attentions": ("rfa:colour=3",)}, "colour"),
        ({"jobs": 0}, "at least 1 job, got 0"),
        ({"train_options": (("steps", "many"),)}, "whole number, got 'many'"),
        ({"train_options": (("seed", "3"),)}, "'seed' is the sweep's own"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options, more, problem):
    with pytest.raises(ValueError, match=problem):
        options(**more)


def test_a_first_seed_is_complete_before_a_second(options):
    cells = options(("text", "image"), ("softmax", "rfa"), seeds=2).cells
    assert [(cell.seed, cell.task, cell.attention) for cell in cells] == [
        (seed, task, attention)
        for seed in (0, 1)
        for task in ("text", "image")
        for attention in ("softmax", "rfa")
    ]


@pytest.mark.parametrize(("has_gpu", "parallel"), [(True, 4), (False, 1)])
def test_timing_takes_one_run_of_each_and_shares_the_device_with_none(
    options, monkeypatch, has_gpu, parallel
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    timed = options(seeds=3, jobs=4, timing=True)
    assert timed.parallel == parallel
    assert timed.cells == [Cell("text", "softmax", 0, timing=True)]
    command = train_command(timed.cells[0], timed)
    assert "--timing" in command
    assert "--shared-device" not in command


def test_the_command_says_whether_the_device_is_shared(options):
    alone, shared = options(), options(jobs=2)
    assert "--shared-device" not in train_command(alone.cells[0], alone)
    assert "--shared-device" in train_command(shared.cells[0], shared)


def test_a_cell_that_is_named_twice_is_run_once(options):
    assert len(options(tasks=("text", "text"), attentions=("softmax", "softmax")).cells) == 1


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_run_in_another_precision_is_another_run(options, monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    usual, other = ("32-true", "bf16-mixed")[:: -1 if has_gpu else 1]
    asked = options(train_options=())
    known = {precision: run(settings={"precision": precision}) for precision in (usual, other)}
    assert is_known(asked.cells[0], asked, [known[usual]])
    assert not is_known(asked.cells[0], asked, [known[other]])
    given = options(train_options=(("precision", other),))
    assert is_known(given.cells[0], given, [known[other]])
    on_cpu = options(train_options=(("accelerator", "cpu"),))
    assert is_known(on_cpu.cells[0], on_cpu, [known["32-true"]])
