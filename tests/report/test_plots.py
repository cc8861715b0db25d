"""Plots are well-formed SVG, the same for the same rows, and draw what was measured and nothing else."""

import xml.etree.ElementTree as ElementTree

import pytest

from schoenbat.report import plots


@pytest.mark.parametrize(
    ("plot", "rows", "names"),
    [
        (plots.error_plot, "errors", ["exp, paper", "sqrt, exact-low", "d = 200"]),
        (plots.speedup_plot, "speeds", ["exp, forward", "exp, forward+backward", "n = 131,072"]),
        (plots.length_plot, "speeds", ["RMFA, exp", "SDPA", "forward+backward"]),
        (plots.attention_speed_plot, "attention_speeds", ["nystromformer", "mean", "forward+backward"]),
        (plots.attention_error_plot, "attention_errors", ["approximates softmax", "performer", "rfa"]),
        (
            plots.translation_plot,
            "translated",
            ["softmax", "validation BLEU", "validation perplexity", "epoch"],
        ),
        (plots.training_plot, "trained", ["softmax", "schoenbat", "most frequent label"]),
        (
            plots.agreement_plot,
            "agreements",
            ["linear, calibrated", "window only", "aan", "features D", "window ±w", "rank correlation"],
        ),
    ],
)
def test_plots_are_svg_with_named_panels_and_curves(request, plot, rows, names):
    svg = plot(request.getfixturevalue(rows))
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    # matplotlib draws letters as paths and keeps the text beside them as a comment.
    assert [name for name in names if f"<!-- {name} -->" not in svg] == []


def test_the_same_rows_give_the_same_file(trained):
    assert plots.training_plot(trained) == plots.training_plot(trained)
    assert plots.training_plot(trained) != plots.training_plot(trained[:1])


def test_what_was_not_measured_is_not_drawn(speeds):
    figures = [plots.length_plot(rows) for rows in (speeds, [row for row in speeds if row.method != "sdpa"])]
    assert ["<!-- SDPA -->" in svg for svg in figures] == [True, False]


def test_an_aim_that_no_attention_has_gets_no_panel(attention_errors):
    other = [row for row in attention_errors if not row.approximates_softmax]
    svg = plots.attention_error_plot(other)
    assert "something else: a distance" in svg
    assert "approximates softmax" not in svg


def test_attentions_are_told_apart_by_colour_and_dashes(attention_errors):
    styles = plots._styles(row.attention for row in attention_errors)
    assert len({tuple(style.items()) for style in styles.values()}) == len(styles)
