"""Plots are well-formed SVG, the same for the same rows, and draw what was measured and nothing else."""

import xml.etree.ElementTree as ElementTree

from schoenbat.report import plots


def test_plots_are_svg_and_repeat(errors, speeds, trained):
    for plot, rows in [
        (plots.error_plot, errors),
        (plots.speedup_plot, speeds),
        (plots.length_plot, speeds),
        (plots.training_plot, trained),
    ]:
        svg = plot(rows)
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert svg == plot(rows)


def test_panels_and_curves_are_named(errors, speeds, trained):
    # matplotlib draws letters as paths and keeps the text beside them as a comment.
    error, speedup, length = plots.error_plot(errors), plots.speedup_plot(speeds), plots.length_plot(speeds)
    assert all(f"<!-- {kernel}, paper -->" in error for kernel in ("exp", "sqrt"))
    assert "<!-- d = 200 -->" in error
    assert "<!-- exp, forward+backward -->" in speedup
    assert all(f"<!-- {method} -->" in length for method in ("RMFA", "SDPA", "exact kernelized attention"))
    assert "<!-- most frequent label -->" in plots.training_plot(trained)


def test_a_missing_rival_leaves_the_curve_shorter(speeds):
    measured = [row for row in speeds if row.method != "sdpa"]
    assert plots.length_plot(speeds) != plots.length_plot(measured)
    assert "<!-- SDPA -->" not in plots.length_plot(measured)
