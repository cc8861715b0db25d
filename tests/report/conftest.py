"""Rows as the experiments yield them, for tables and plots."""

import itertools
from dataclasses import replace

import pytest

from schoenbat.experiments.comparison import AttentionError, AttentionSpeed, approximates_softmax
from schoenbat.experiments.demo import DemoRow, Point
from schoenbat.experiments.error import ErrorRow
from schoenbat.experiments.measurement import PASSES
from schoenbat.experiments.speed import SpeedRow
from schoenbat.registry import attention_names
from schoenbat.translation.record import EpochRow


@pytest.fixture
def errors():
    return [
        ErrorRow(kernel, construction, head_dim, count, 1.234e-5 * count, 1e-6, 0.0123)
        for kernel, construction, head_dim, count in itertools.product(
            ("exp", "sqrt"), ("paper", "exact-low"), (10, 200), (10, 20, 30, 40, 50)
        )
    ]


@pytest.fixture
def agreements():
    """A model without a window has no value on that axis."""
    models = [
        ("features", 32, "linear"), ("features", 128, "linear"), ("window", None, "linear"),
        ("window", 4, "window only"), ("window", 64, "window only"), ("scale", 0.5, "softmax"),
    ]  # fmt: skip
    return [
        {"against": against, "value": value, "attention": attention, "calibrated": calibrated}
        | {"corpus": corpus, "cosine": 0.9, "spearman": 0.8}
        for (against, value, attention), corpus, calibrated in itertools.product(
            models, ("imdb", "aan"), (False, True)
        )
    ]


@pytest.fixture
def speeds():
    return [
        row
        for length, seconds, direction in itertools.product((1000, 131_072), (0.5,), PASSES)
        for row in (
            SpeedRow("sdpa", None, length, None, direction, None if length > 1000 else seconds, memory=2**35),
            SpeedRow("exact", "exp", length, None, direction, 4 * seconds, memory=2**36),
            SpeedRow("rmfa", "exp", length, 120, direction, seconds / 100, memory=3 * 2**20),
        )
    ]


@pytest.fixture
def attention_speeds():
    """Time grows like n², memory like n; softmax was left out at the longest."""
    return [
        AttentionSpeed(name, length, direction)
        if (name, length) == ("softmax", 8192)
        else AttentionSpeed(name, length, direction, 1e-7 * length**2, memory=2**15 * length)
        for name, length, direction in itertools.product(attention_names(), (1024, 2048, 4096, 8192), PASSES)
    ]


@pytest.fixture
def attention_errors():
    return [
        AttentionError(name, length, 0.0 if name == "softmax" else 1.234e-5, 1e-6, approximates_softmax(name))
        for name, length in itertools.product(attention_names(), (128, 256, 512, 1024))
    ]


@pytest.fixture
def translated():
    """Two epochs for each attention, the second of which was tested."""
    names = ("softmax", "schoenbat:construction=paper,normalization=token,scale=none")
    rows = [
        EpochRow(name, 0, epoch, 3.1, 2.0, 7.4, 30.5, 2.5, 7_500_000) for name in names for epoch in (1, 2)
    ]
    return [
        replace(row, test_bleu_greedy=36.12, test_bleu_beam=37.28) if row.epoch == 2 else row for row in rows
    ]


@pytest.fixture
def trained():
    return [
        DemoRow(name, 76_000, accuracy, 0.186, 31.0, [Point(1, 2.0, accuracy)])
        for name, accuracy in [("softmax", 0.391), ("schoenbat", 0.384)]
    ]
