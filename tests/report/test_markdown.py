"""Tables in Markdown: figures to the right, and a terminal's table with all its words."""

from rich.table import Table

from schoenbat.report.markdown import from_rich, table


def test_figures_are_to_the_right_whatever_marks_them():
    cells = [["1,024", "*0.5*", "+3.1", "(2.0)", "–", "n = 3"], ["", "–", "−1", "2", "", "4"]]
    assert table(list("abcdef"), cells).splitlines()[1] == "| ---: | ---: | ---: | ---: | --- | --- |"


def test_a_table_without_lines_has_a_heading():
    assert table(["a", "b"], []) == "| a | b |\n| --- | --- |"


def test_a_terminals_table_keeps_title_caption_and_sides():
    shown = Table(title="of two", caption="in\nwords")
    shown.add_column("name")
    shown.add_column("ms\na step", justify="right")
    shown.add_row("softmax", "< 0.1")
    shown.add_section()
    shown.add_row("none", "–")
    assert from_rich(shown).split("\n") == [
        "**of two**",
        "",
        "| name | ms a step |",
        "| --- | ---: |",
        "| softmax | < 0.1 |",
        "| none | – |",
        "",
        "in words",
    ]


def test_words_that_a_terminal_divides_are_whole():
    shown = Table()
    shown.add_column("para-\nmeters\nin all")
    assert from_rich(shown).startswith("| parameters in all |")
