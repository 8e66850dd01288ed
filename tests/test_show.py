"""Text that fits: fields of a line, and prose."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dualtune.base.text import cut, fitted, in_short_time, in_time, wrapped

FIELDS = [("step   12/30", "step 12/30"), ("loss 1.2345",), ("grad norm 1.00e+00", "grad 1.0e+00"), ("peak 0.41 GiB",)]
PROSE = st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=40).map(" ".join)


def test_a_line_is_shortened_before_anything_is_left_out():
    assert fitted(FIELDS, 80) == "step   12/30  loss 1.2345  grad norm 1.00e+00  peak 0.41 GiB"
    assert fitted(FIELDS, 56) == "step   12/30  loss 1.2345  grad 1.0e+00  peak 0.41 GiB"
    assert fitted(FIELDS, 53) == "step 12/30  loss 1.2345  grad 1.0e+00  peak 0.41 GiB"
    assert fitted(FIELDS, 40) == "step 12/30  loss 1.2345  grad 1.0e+00"
    assert fitted(FIELDS, 3) == "step 12/30"


@given(text=PROSE, width=st.integers(24, 100))
@example(text="aaa", width=24)
def test_prose_keeps_its_words_and_fits(text, width):
    lines = wrapped(f"label       {text}", width).split("\n")
    assert all(len(line) <= width for line in lines)
    assert all(line.startswith(" " * 12) for line in lines[1:])
    assert " ".join(lines).split() == ["label", *text.split()]


def test_characters_of_two_columns_count_twice():
    assert fitted([("一二三四",), ("ok",)], 12) == "一二三四  ok"
    assert fitted([("一二三四",), ("ok",)], 11) == "一二三四"
    lines = wrapped("标签        一二三 四五六 七八九", 24).split("\n")
    assert lines == ["标签        一二三", "            四五六", "            七八九"]
    assert (cut("一二三四", 8), cut("一二三四", 7), cut("一二三四", 6)) == ("一二三四", "一二三…", "一二…")
    assert (cut("abcd", 4), cut("abcde", 4)) == ("abcd", "abc…")


def test_a_path_stays_whole_and_the_commas_of_json_are_broken_behind():
    path = "/a" * 20
    assert wrapped(f"adapter     {path} and more", 30) == f"adapter     {path}\n            and more"
    lines = wrapped('expected    {"customer":"Ann","item":"pillows","day":"Monday"}', 34).split("\n")
    assert [line[12:] for line in lines] == ['{"customer":"Ann",', '"item":"pillows",', '"day":"Monday"}']


def test_what_continues_a_row_of_a_table_stands_below_its_last_column():
    lines = wrapped("ok    python  3.11 is here and will do for all", 30).split("\n")
    assert lines == ["ok    python  3.11 is here and", "              will do for all"]


def test_times_are_read_at_a_glance():
    assert [in_time(seconds) for seconds in (0.4, 59.4, 61, 3600, 7500)] == [
        "0 s", "59 s", "1 min 01 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), [
    (0.000118, "0.12 ms"), (0.00999, "9.99 ms"), (0.009996, "10.0 ms"), (0.0123, "12.3 ms"), (0.09996, "100 ms"),
    (0.345, "345 ms"), (0.9994, "999 ms"), (0.9996, "1.00 s"), (1.234, "1.23 s"), (9.996, "10.0 s"), (12.34, "12.3 s"),
    (185.2, "3 min 05 s"), (0, "0.00 ms"),
])  # fmt: skip
def test_short_durations_have_three_digits(seconds, text):
    assert in_short_time(seconds) == text
