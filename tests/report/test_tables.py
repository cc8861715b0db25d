"""Tables fit 100 columns, show every row, and leave cells empty where nothing was measured."""

import io
from dataclasses import replace

from rich.console import Console

from schoenbat.report import tables


def printed(table, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_tables_fit_100_columns(errors, speeds, attention_speeds, attention_errors, trained):
    for table in (
        *tables.error_tables(errors),
        *tables.speed_tables(speeds),
        tables.attention_speed_table(attention_speeds),
        tables.attention_error_table(attention_errors),
        tables.demo_table(trained),
    ):
        assert Console(width=10_000).measure(table).maximum <= 100
        assert "…" not in printed(table)


def test_nothing_is_cut_in_80_columns(errors, speeds, attention_speeds, attention_errors, translated):
    for table in (
        *tables.error_tables(errors),
        *tables.speed_tables(speeds),
        tables.attention_speed_table(attention_speeds),
        tables.attention_error_table(attention_errors),
        tables.translation_table(translated),
    ):
        lines = printed(table, width=80).splitlines()
        assert [line for line in lines if "…" in line or len(line) > 80] == []


def test_error_tables(errors):
    texts = [printed(table) for table in tables.error_tables(errors)]
    assert ["paper" in texts[0], "exact-low" in texts[1]] == [True, True]
    assert texts[0].count("0.00062 (0.012)") == 4


def test_speed_tables_show_ratios_and_leave_out_what_was_not_measured(speeds):
    (text,) = (printed(table) for table in tables.speed_tables(speeds))
    short = next(line for line in text.splitlines() if line.strip().startswith("1,000"))
    long = next(line for line in text.splitlines() if line.strip().startswith("131,072"))
    assert short.split()[:5] == ["1,000", "120", "5", "100×", "400×"]
    assert long.split()[:5] == ["131,072", "120", "5", "–", "400×"]
    assert text.count(" 3 ") == 2


def test_crossover_in_words(speeds):
    assert list(tables.crossover_lines(speeds)) == [
        "forward: RMFA with exp and the map exact-low is faster than SDPA from n = 1,000 on",
        "forward+backward: RMFA with exp and the map exact-low is faster than SDPA from n = 1,000 on",
    ]
    without = [row for row in speeds if row.method != "sdpa"]
    assert "not measured beside SDPA" in next(tables.crossover_lines(without))
    slower = [replace(row, median=1e3) if row.method == "rmfa" else row for row in speeds]
    assert "not faster than SDPA up to n = 1,000" in next(tables.crossover_lines(slower))


def cells(text, name):
    return next(line for line in text.splitlines() if line.split()[:1] == [name]).split()[1:]


def test_attention_speed_table_shows_growth_and_leaves_out_what_was_not_measured(attention_speeds):
    text = printed(tables.attention_speed_table(attention_speeds))
    assert cells(text, "performer") == ["105", "419", "1,678", "6,711", "2.00", "256", "1.00"]
    assert cells(text, "softmax") == ["105", "419", "1,678", "–", "2.00", "–", "1.00"]


def test_attention_error_table_marks_what_approximates_something_else(attention_errors):
    text = printed(tables.attention_error_table(attention_errors))
    assert cells(text, "performer")[:3] == ["1.2e-05", "±", "1e-06"]
    assert cells(text, "rfa")[:2] == ["*", "1.2e-05"]
    assert "* approximates something else" in text


def test_long_names_of_attentions_are_folded(attention_errors):
    long = "schoenbat:kernel=inv,post=false,construction=exact-low,num_features=256,normalization=l2"
    text = printed(tables.attention_error_table([replace(row, attention=long) for row in attention_errors]))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_demo_table_and_summary(errors, speeds, trained):
    text = printed(tables.demo_table(trained))
    assert all(number in text for number in ("39.1%", "38.4%", "18.6%", "76,000"))
    summary = "\n".join(tables.demo_summary(errors, speeds, trained))
    assert "softmax 39.1%, schoenbat 38.4%, most frequent label 18.6%" in summary
    assert "forward at n = 1,000: RMFA is 100 times as fast as SDPA" in summary
    assert "–" not in summary
    assert "'exact-low' map for sqrt at d = 200, D = 50: 0.012" in summary


def test_the_translation_table_shows_the_epoch_that_was_tested(translated):
    text = printed(tables.translation_table(translated))
    line = next(line for line in text.splitlines() if line.strip().startswith("softmax"))
    assert line.split() == ["softmax", "7,500,000", "2.5", "2", "2.000", "7.4", "30.5", "36.1", "37.3"]
    assert text.count("36.1") == 2
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100
