"""The comparison of all attentions: its cells, its measure of error, and what it leaves out."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from schoenbat.experiments import comparison
from schoenbat.experiments.comparison import (
    AttentionSpeed,
    ErrorComparison,
    SpeedComparison,
    approximates_softmax,
    growth,
)
from schoenbat.experiments.measurement import BACKWARD, FORWARD
from schoenbat.registry import attention_names

SMALL = {"lengths": (16, 32), "num_heads": 2, "head_dim": 8}
SPEED = SpeedComparison(**SMALL, seconds=0.0)
ERROR = ErrorComparison(**SMALL, repetitions=3)


def test_every_attention_is_timed_at_every_length_in_both_directions(monkeypatch):
    # Measuring memory collects garbage, in a process full of tests a tenth of a second each time.
    monkeypatch.setattr(comparison, "peak_memory", lambda call, device: 2**20)
    rows = list(comparison.run_speed(SPEED))
    assert len(rows) == SPEED.total == 2 * 2 * len(attention_names())
    assert len({(row.attention, row.length, row.direction) for row in rows}) == len(rows)
    for row in rows:
        assert 0 < row.low <= row.median <= row.high < math.inf
        assert row.repetitions >= 3
        assert row.memory == 2**20


def test_every_attention_has_a_finite_error_at_every_length():
    rows = list(comparison.run_error(ERROR))
    assert len(rows) == ERROR.total == 2 * len(attention_names())
    assert {row.attention for row in rows} == set(attention_names())
    for row in rows:
        assert math.isfinite(row.error)
        assert math.isfinite(row.standard_error)
        if row.attention == "softmax":
            assert (row.error, row.standard_error) == (0.0, 0.0)
        if row.attention == "mean":
            assert row.error == pytest.approx(1.0, abs=1e-4)


def test_softmax_gets_logits_of_the_stated_scale():
    query, key, value = comparison._draw_inputs(ERROR, 32, seed=0)
    cosine = F.cosine_similarity(query[..., :, None, :], key[..., None, :, :], dim=-1)
    torch.testing.assert_close(query @ key.mT / 8**0.5, 4 * cosine)
    assert value.shape == (1, 2, 32, 8)


def test_the_error_is_what_it_says():
    (row,) = comparison.run_error(replace(ERROR, attentions=("cosformer",), lengths=(16,), repetitions=2))
    relative = []
    for seed in range(2):
        query, key, value = comparison._draw_inputs(ERROR, 16, seed)
        softmax = (query @ key.mT / 8**0.5).softmax(-1) @ value
        output = comparison._build("cosformer", ERROR, seed)(query, key, value)
        averaging = (softmax - value.mean(-2, keepdim=True)).abs().mean()
        relative.append(((output - softmax).abs().mean() / averaging).item())
    assert row.error == pytest.approx(sum(relative) / 2, rel=1e-4)
    assert row.standard_error == pytest.approx(abs(relative[0] - relative[1]) / 2, rel=1e-2)


def test_a_bare_schoenbat_approximates_the_softmax_it_is_compared_with():
    """More features bring it closer, at another scale than its own too."""
    options = replace(ERROR, lengths=(32,), logit_scale=2.0)
    exact = "schoenbat:scale=2,post=false,construction=exact-low,num_features="
    few, many = comparison.run_error(replace(options, attentions=(f"{exact}64", f"{exact}4096")))
    assert many.error < few.error / 2
    bare, same = comparison.run_error(
        replace(options, attentions=("schoenbat", "schoenbat:scale=2,post=false"))
    )
    assert bare.error == same.error


@pytest.mark.parametrize("name", ["performer", "rfa", "schoenbat", "reformer", "skyformer"])
def test_every_repetition_has_a_map_of_its_own_unless_a_seed_is_given(name):
    def differ(text):
        first, second = (comparison._build(text, ERROR, seed).state_dict() for seed in (0, 1))
        return any(not torch.equal(first[key], second[key]) for key in first)

    assert differ(name)
    assert not differ(f"{name}:seed=3")


def test_maps_are_not_made_of_the_numbers_of_the_queries():
    frequencies = comparison._build("rfa", ERROR, 0).frequencies
    same_numbers = torch.randn(frequencies.shape, generator=torch.Generator().manual_seed(0))
    assert not torch.isclose(frequencies, same_numbers).any()


def test_the_seed_decides():
    options = replace(ERROR, attentions=("performer",))
    assert list(comparison.run_error(options)) == list(comparison.run_error(options))
    assert list(comparison.run_error(options)) != list(comparison.run_error(replace(options, seed=1)))


@pytest.mark.parametrize(
    ("attention", "budget", "measured"),
    [("softmax", 3.0, [True, False, False]), ("performer", 3.0, [True, True, False])],
)
def test_what_would_take_too_long_is_left_out_from_there_on(monkeypatch, attention, budget, measured):
    """A second for each 8 tokens: beyond 3 s the square is at 16, the line at 32."""
    monkeypatch.setattr(
        comparison, "_measure", lambda row, *_: replace(row, median=row.length / 8, memory=100)
    )
    options = replace(SPEED, attentions=(attention,), lengths=(8, 16, 32), budget=budget)
    rows = [row for row in comparison.run_speed(options) if row.direction == BACKWARD]
    assert [row.median is not None for row in rows] == measured


def test_what_would_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(comparison, "available_memory", lambda device: 300)
    monkeypatch.setattr(comparison, "_measure", lambda row, *_: replace(row, median=1e-3, memory=100))
    rows = comparison.run_speed(replace(SPEED, attentions=("softmax", "performer")))
    assert {(row.attention, row.length) for row in rows if row.median is None} == {("softmax", 32)}


def test_growth_is_the_power_of_n():
    rows = [AttentionSpeed("a", n, FORWARD, median=3.0 * n**1.5, memory=7 * n**2) for n in (16, 32, 64)] + [
        AttentionSpeed("a", 128, FORWARD)
    ]
    assert growth(rows, "a", "median", FORWARD) == pytest.approx(1.5)
    assert growth(rows, "a", "memory", FORWARD) == pytest.approx(2.0)
    assert growth(rows, "a", "memory", BACKWARD) is None
    assert growth(rows[:1], "a", "median", FORWARD) is None


def test_which_attentions_approximate_softmax():
    chosen = {name for name in attention_names() if approximates_softmax(name)}
    assert chosen == {"softmax", "nystromformer", "informer", "bigbird", "performer", "schoenbat"}
    assert not approximates_softmax("schoenbat:post=false,kernel=inv")


@pytest.mark.parametrize(
    ("attention", "does"),
    [
        ("softmax:causal=true", False),
        ("schoenbat:causal=both", False),
        ("softmax:window=4", False),
        ("schoenbat:window=4", True),
        ("schoenbat:kernel=exp(x)-0.9", False),
        ("schoenbat: kernel = inv", False),
        ("schoenbat:kernel=trigh", True),
        ("softmax:scale=2.0", False),
        ("softmax:scale=none", True),
        ("schoenbat:scale=4.0,post=false", True),
        ("schoenbat:scale=2.0", False),
        ("softmax:head_norm=true", False),
    ],
)
def test_options_decide_whether_an_attention_approximates_softmax(attention, does):
    assert approximates_softmax(attention) is does


@pytest.mark.parametrize(
    ("attention", "problem"),
    [
        ("foo", "unknown attention 'foo'; known are softmax"),
        ("rfa:colour=3", "unknown option 'colour'"),
        ("performer:num_features=many", "performer:num_features=many"),
        ("nystromformer:causal=true", "no causal form"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(attention, problem):
    with pytest.raises(ValueError, match=problem):
        SpeedComparison(("softmax", attention))


def test_one_repetition_has_no_standard_error():
    with pytest.raises(ValueError, match="at least 2 repetitions, got 1"):
        ErrorComparison(repetitions=1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="PyTorch sees no GPU"):
        SpeedComparison(device="cuda:1")
