"""Files to rows: every kind of file gives what was written into it, with the place that it was written to."""

import csv
import gzip
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualtune.data.sources.readers import open_source
from dualtune.data.sources.rows import RawRow

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FIELDS = st.dictionaries(TEXT, TEXT | st.none() | st.booleans() | st.lists(TEXT, max_size=3), max_size=4)
in_one_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def rows_of(tmp_path):
    """Write a file and read it: (line, fields) of each row. A bad row fails the test."""

    def read(name: str, data: bytes):
        path = tmp_path / name
        path.write_bytes(data)
        rows = list(open_source(str(path)).rows())
        assert all(isinstance(row, RawRow) and row.path == str(path) for row in rows), rows
        return [(row.line, row.fields) for row in rows]

    return read


def lines_of(objects, end="\n") -> bytes:
    return "".join(json.dumps(fields, ensure_ascii=False) + end for fields in objects).encode()


def parquet_of(table) -> bytes:
    pq = pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


# --- what is written is read -----------------------------------------------------------------------------------------


@in_one_directory
@given(st.lists(FIELDS, min_size=1, max_size=8))
def test_json_in_every_dress_reads_back_equal(rows_of, objects):
    lines = lines_of(objects)
    expected = list(enumerate(objects, start=1))
    assert rows_of("a.jsonl", lines) == expected
    assert rows_of("a.ndjson", lines.rstrip(b"\n")) == expected
    assert rows_of("a.jsonl.gz", gzip.compress(lines)) == expected
    whole = [fields for _, fields in rows_of("a.json", json.dumps(objects, indent=2).encode())]
    assert whole == objects
    assert [fields for _, fields in rows_of("b.json", json.dumps({"n": 1, "rows": [{}, *objects]}).encode())][
        1:
    ] == objects


@in_one_directory
@given(st.lists(st.tuples(TEXT, TEXT.filter(bool)), min_size=1, max_size=8))
def test_tables_of_text_read_back_equal(rows_of, pairs):
    objects = [{"prompt": a, "completion": b} for a, b in pairs]
    if not any("\0" in text for pair in pairs for text in pair):  # these are a bad row
        for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
            out = io.StringIO(newline="")
            writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL)
            writer.writerows([("prompt", "completion"), *pairs])
            assert [fields for _, fields in rows_of(name, out.getvalue().encode())] == objects


@settings(in_one_directory, max_examples=10)  # each file is read in a process of its own
@given(st.lists(st.tuples(TEXT, TEXT.filter(bool)), min_size=1, max_size=80))
def test_tables_of_parquet_read_back_equal(rows_of, pairs):
    pa = pytest.importorskip("pyarrow")
    objects = [{"prompt": a, "completion": b} for a, b in pairs]
    assert rows_of("a.parquet", parquet_of(pa.Table.from_pylist(objects))) == list(enumerate(objects, start=1))


@in_one_directory
@given(st.lists(FIELDS, min_size=1, max_size=5), st.integers(0, 3), st.sampled_from(["\n", "\r\n"]))
def test_a_row_of_a_json_array_has_the_line_that_it_starts_on_or_else_the_next_number(
    rows_of, objects, blanks, newline
):
    pieces = [json.dumps(fields, indent=1).replace("\n", newline) for fields in objects]
    text = "[" + newline * blanks + ("," + newline * blanks).join(pieces) + newline + "]"
    at = [1 + blanks]
    for piece in pieces[:-1]:
        at.append(at[-1] + piece.count("\n") + blanks)
    lines = [at[0]]
    for line in at[1:]:
        lines.append(max(line, lines[-1] + 1))
    assert [line for line, _ in rows_of("a.json", text.encode())] == lines


@pytest.mark.parametrize(("name", "data"), [
    ("a.json", b'[{"text": "a"}, {"text": "b"}, {"text": "c"}]'),
    ("a.txt", b"word " * 8192),
])  # fmt: skip
def test_rows_that_begin_on_one_line_have_numbers_of_their_own(rows_of, name, data):
    """A row is found again by its place: held-out rows, the columns of a reward, leaks."""
    assert [line for line, _ in rows_of(name, data)] == [1, 2, 3]


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("last", [True, False])
def test_byte_order_marks_windows_lines_and_a_missing_last_newline_are_accepted(rows_of, newline, mark, last):
    lines = lines_of([{"text": "eins"}, {"text": "zwei\u2028drei\x85"}], newline)  # neither of these ends a line
    data = mark.encode() + (lines if last else lines.rstrip())
    assert rows_of("a.jsonl", data) == [(1, {"text": "eins"}), (2, {"text": "zwei\u2028drei\x85"})]


def test_blank_lines_are_counted_and_skipped(rows_of):
    assert rows_of("a.jsonl", b'\n{"a": 1}\n\n \t \r\n{"a": 2}\n\n') == [(2, {"a": 1}), (5, {"a": 2})]


def test_a_json_file_of_json_lines_is_read_as_such(rows_of):
    data = b'\xef\xbb\xbf\n{"a": 1}\n\n{"a": [{"b": 2}]}\n'
    assert rows_of("a.json", data) == [(2, {"a": 1}), (4, {"a": [{"b": 2}]})]


def test_the_list_of_objects_is_found_among_other_keys(rows_of):
    data = b'{"version": "[1", "tags": ["x"], "none": [],\n "data": [\n  {"a": 1},\n  {"a": 2}], "n": 1e5}\n'
    assert rows_of("a.json", data) == [(3, {"a": 1}), (4, {"a": 2})]


def test_suffixes_are_known_in_capitals_too(rows_of):
    assert rows_of("A.JSONL.GZ", gzip.compress(b"{}\n") + gzip.compress(b"{}\n")) == [(1, {}), (2, {})]


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_csv_row_has_the_line_that_it_starts_on(rows_of):
    data = b'\xef\xbb\xbf\r\nq,a\r\n"1\r\n2","x ""y"""\r\n\r\n,\xc3\xa9\r\n3,4'
    assert rows_of("a.csv", data) == [
        (3, {"q": "1\r\n2", "a": 'x "y"'}),
        (6, {"q": "", "a": "é"}),
        (7, {"q": "3", "a": "4"}),
    ]


def test_a_cell_may_be_longer_than_the_csv_module_allows_by_itself(rows_of):
    assert rows_of("a.tsv.gz", gzip.compress(b"text\n" + b"x" * 300_000))[0][1] == {"text": "x" * 300_000}


def test_null_fields_that_parquet_puts_into_objects_are_dropped_again(rows_of):
    pa = pytest.importorskip("pyarrow")
    calls = [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"y": [None, {"z": None}]}}]
    rows = [{"calls": calls, "note": None}, {"calls": None, "note": "n"}]
    table = pa.Table.from_pylist(rows)
    assert table.to_pylist()[0]["calls"][0]["arguments"] == {"x": 1, "y": None}  # this is what Parquet makes of it
    calls[1]["arguments"]["y"][1] = {}
    assert rows_of("a.parquet", parquet_of(table)) == list(enumerate(rows, start=1))


def test_json_columns_of_parquet_are_decoded_however_deep(rows_of):
    pa = pytest.importorskip("pyarrow")
    top = pa.array(['{"b": null}', None], pa.json_())
    objects = pa.StructArray.from_arrays([pa.array(['{"a": [1, null]}', None], pa.json_())], ["j"])
    table = pa.table(
        {"c": pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 2, 2], objects)], ["t"]), "top": top}
    )
    assert rows_of("a.parquet", parquet_of(table)) == [
        (1, {"c": {"t": [{"j": {"a": [1, None]}}, {}]}, "top": {"b": None}}),
        (2, {"c": {"t": []}, "top": None}),
    ]


# --- plain text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.text", "a.txt.gz"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("blank_lines", [True, False])
def test_plain_text_comes_in_whole_paragraphs_or_else_lines(rows_of, name, newline, blank_lines):
    lines = [f"{i} é".encode() * 5 if i % 7 or not blank_lines else b"" for i in range(12_000)]
    data = newline.join(lines)
    rows = rows_of(name, gzip.compress(data, 1) if name.endswith("gz") else data)
    texts = [fields["text"] for _, fields in rows]
    assert "".join(texts) == b"\n".join(lines).decode()
    assert [line for line, _ in rows] == ["".join(texts[:i]).count("\n") + 1 for i in range(len(texts))]
    assert all(text.endswith("\n\n" if blank_lines else "\n") for text in texts[:-1])
    sizes = [len(text.encode()) + text.count("\n") * (len(newline) - 1) for text in texts[:-1]]
    assert len(sizes) > 10 and all(15_000 < size <= 1 << 14 for size in sizes)


@pytest.mark.parametrize("char", ["x", "é", "語", "😀"])
def test_a_line_without_end_is_cut_between_characters(rows_of, char):
    text = "ab\n-" + char * ((5 << 13) // len(char.encode()))
    rows = rows_of("a.txt", text.encode())
    assert "".join(fields["text"] for _, fields in rows) == text
    assert [line for line, _ in rows] == [1, 2, 3, 4]
    assert all(len(fields["text"].encode()) <= 1 << 14 for _, fields in rows)


# --- progress and identity -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "b.json", "a.csv", "a.parquet"])
def test_progress_grows_evenly_to_one(tmp_path, name):
    pa = pytest.importorskip("pyarrow")
    objects = [{"text": f"{i:0200}"} for i in range(10_000)]
    path = tmp_path / name
    data = {
        "a.jsonl": lambda: lines_of(objects),
        "a.jsonl.gz": lambda: gzip.compress(lines_of(objects), 0),
        "a.json": lambda: json.dumps(objects).encode(),
        "b.json": lambda: lines_of(objects),
        "a.csv": lambda: "\n".join(["text", *(fields["text"] for fields in objects)]).encode(),
        "a.parquet": lambda: parquet_of(pa.Table.from_pylist(objects)),
    }[name]()
    path.write_bytes(data)
    told = []
    for _ in open_source(str(path)).rows(told.append):
        pass
    assert told == pytest.approx([i / 10 for i in range(1, 11)] + [1.0], abs=0.06)


def test_identity_is_a_function_of_kind_and_content_alone(tmp_path):
    def identity(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        return open_source(str(tmp_path / name)).identity()

    assert identity("a.jsonl", b"{}\n") == identity("b.jsonl", b"{}\n")
    assert len({identity("a.jsonl", b"{}\n"), identity("a.txt", b"{}\n"), identity("a.jsonl", b"{} \n")}) == 3


def test_reading_needs_neither_pyarrow_nor_datasets(tmp_path, python):
    (tmp_path / "a.jsonl").write_text("{}\n")
    code = (
        "import sys; from dualtune.data.sources.readers import open_source;"
        "print(len(list(open_source('a.jsonl').rows())), {'pyarrow', 'datasets', 'torch'} & set(sys.modules))"
    )
    assert python("-c", code, cwd=tmp_path).stdout == "1 set()\n"
