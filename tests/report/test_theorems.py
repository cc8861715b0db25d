"""Tables and plot of the theorems' checks: what is no bias, no statement and no bound is not shown as one."""

import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from rich.console import Console

from schoenbat.experiments.theorems import BiasRow, FormulaRow, KernelRow, RestoringRow, TailRow
from schoenbat.experiments.theorems.bias import QUANTITIES
from schoenbat.report.plots import theorem_plot
from schoenbat.report.theorems import theorem_tables


@pytest.fixture
def rows():
    unseen = {"numerator", "denominator"}
    return [
        *(
            BiasRow("bias", "paper", 16, count, 8192, quantity, 0.8 / count, 1e-3, z, along, 1.0, 0.25)
            for count in (8, 16, 32)
            for quantity in QUANTITIES
            for z in [0.5 if quantity in unseen else 9.0]
            for along in [0.1 if quantity == "ratio" else -0.1]
        ),
        TailRow("tail", "rows", "exp", 16, 128, 1.0, 64, 199.4, 4683, 0.25, 0.5, 0.0),
        TailRow("tail", "pair", "inv", 1, 256, 1.0, 64, 1.3e-53, 5, 0.0625, 0.0625, 1.0),
        KernelRow("kernels", 32, 0.5, "exp", "inv", 0.0688, 0.00627, False),
        KernelRow("kernels", 32, 0.5, "exp", "trigh", 0.0, 0.0, True),
        KernelRow("kernels", 32, 0.5, "exp", "averaging", 1.0, 0.091, False),
        KernelRow("kernels", 32, 0.5, "sqrt", "exp(x/2)", 0.0012, 0.00011, False),
        FormulaRow("formula", 16, 32, 0.0399),
        RestoringRow("restoring", 32, "signed", "best γ", 0.966),
    ]


def printed(rows):
    console = Console(width=100, file=io.StringIO())
    for table in theorem_tables(rows):
        console.print(table)
    return console.file.getvalue()


def test_a_bias_in_the_noise_is_a_limit(rows):
    line = next(line for line in printed(rows).splitlines() if line.split()[:2] == ["paper", "8"])
    assert line.split()[2:] == ["<", "0.1", "<", "0.1", "+0.1", "±", "0.001", "−0.1", "±", "0.001", "25%"]


def test_a_bias_that_no_number_of_maps_tells_is_not_told(rows):
    unknown = replace(rows[2], z=0.5, standard_error=1.0)
    line = next(line for line in printed([unknown, *rows[4:]]).splitlines() if "paper" in line)
    assert "?" in line


def test_the_decay_is_told(rows):
    assert "paper: the bias of the ratio falls like D^-1.00" in printed(rows)


def test_a_bound_above_one_says_nothing_and_a_broken_one_is_marked(rows):
    text = printed(rows)
    assert "0.25 (–)" in text
    assert "!0.062 (1e-53)" in text


def test_equal_kernels_are_named(rows):
    text = printed(rows)
    assert "trigh = exp" in text
    assert "sqrt is exp(x/2) but for 0.001" in text


def test_tables_fit_100_columns(rows):
    assert max(map(len, printed(rows).splitlines())) <= 100
    assert "…" not in printed(rows)


def test_the_plot_has_a_panel_for_each_check(rows):
    svg = theorem_plot(rows)
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    names = ["bias", "kernels", "1 / D", "inv − exp", "ratio, paper"]
    assert [name for name in names if f"<!-- {name} -->" not in svg] == []
    assert "trigh − exp" not in svg
