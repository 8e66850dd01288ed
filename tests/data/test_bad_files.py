"""Broken files: a row that cannot be used is named with its place and the rows behind it are read; a file that cannot
be read on is an error.
"""

import codecs
import gzip
import os
import sys

import pytest

from dualtune.base.errors import DataError, EnvironmentFault
from dualtune.data.sources.readers import TEXT_BLOCK, open_source
from dualtune.data.sources.rows import BadRow

MIB = 1 << 20
# Linux hands the ru_maxrss of the parent on to its children, which says nothing about them; VmHWM starts afresh.
PEAK = """
import pathlib, re, resource, sys
from dualtune.data.sources.readers import open_source
print([row.line for row in open_source(sys.argv[1]).rows()])
status = pathlib.Path("/proc/self/status")
if status.exists():
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024)
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
TOO_LONG = "line of more than 3 MiB; split it, or put long texts into a .txt file"
CUT = "holds NUL bytes: the file was probably truncated by a crash"


@pytest.fixture
def read(tmp_path):
    """Write a file and read it: a row is its fields, a bad row (line, reason)."""

    def write_and_read(name: str, data: bytes):
        path = tmp_path / name
        path.write_bytes(data)
        rows = list(open_source(str(path)).rows())
        assert {row.path for row in rows} == {str(path)}
        return [(row.line, row.reason) if isinstance(row, BadRow) else row.fields for row in rows]

    return write_and_read


@pytest.fixture
def error_of(read, tmp_path):
    """The error of a file, without its directory."""

    def message(name: str, data: bytes) -> str:
        with pytest.raises(DataError) as caught:
            read(name, data)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return message


# --- rows of JSON lines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1}, "b"', "not JSON: Extra data at column 9: '{\"a\": 1}, \"b\"'"),
        (b'{"a": 1', "not JSON: Expecting ',' delimiter at column 8: '{\"a\": 1'"),
        (b"{'a': 1}", "not JSON: Expecting property name enclosed in double quotes at column 2: \"{'a': 1}\""),
        (b"{" + b'"key": 1, ' * 9 + b"x}" + b" " * 99 + b"!",
         "not JSON: Expecting property name enclosed in double quotes at column 92: "
         "'\"key\": 1, \"key\": 1, x}                  '"),
        (b"[1]", "got a JSON list, a JSON object is needed"),
        (b'"text"', "got a JSON str, a JSON object is needed"),
        (b"null", "got a JSON NoneType, a JSON object is needed"),
        (b'{"a": "\xc3\xa9\xe9"}', "not UTF-8 at byte 10 of the line"),
        (b'{"a": "' + b"\0" * 50, CUT),
        (b"\0" * 50, CUT),
        (b"\xff\0", CUT),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "has the key 'b' more than once"),
        (b'{"a": [NaN]}', "holds NaN, which is not JSON; write null or a number"),
        (b'{"a": -Infinity}', "holds -Infinity, which is not JSON; write null or a number"),
        (b'{"a": -1e999}', "holds the number -1e999, which is too large"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_bad_line_is_named_and_its_neighbours_are_read(read, line, reason):
    data = b'{"before": 1}\n\n' + line + b"\r\n" + b'{"behind": 1}'
    assert read("a.jsonl", data) == [{"before": 1}, (3, reason), {"behind": 1}]
    if b"\0" not in line:
        assert read("a.jsonl.gz", gzip.compress(data)) == read("a.jsonl", data) == read("a.ndjson", data)


@pytest.mark.parametrize("line", [b'{"a": ' * 100_000, b'{"a": ' + b"1" * 5000 + b"}"], ids=["deep", "long number"])
def test_what_python_cannot_take_is_a_bad_line_too(read, line):
    before, (number, reason), behind = read("a.jsonl", b"{}\n" + line + b"\n{}\n")
    assert (before, number, behind) == ({}, 2, {}) and reason.startswith("not usable JSON: ") and len(reason) < 200


@pytest.mark.parametrize(("length", "good"), [(3 * MIB, True), (3 * MIB + 1, False)])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_may_have_3_mib(read, length, good, end):
    line = b'{"a": 1}' + b" " * (length - 8)
    rows = read("a.jsonl", b"{}\n" + line + end + (b"{}" if end else b""))
    assert rows == [{}, {"a": 1} if good else (2, TOO_LONG), *([{}] if end else [])]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_line_of_200_mb_does_not_fill_the_memory(tmp_path, python, name):
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b"text\n" if name == "a.csv" else b"{}\n")
        file.seek(200 * 10**6, os.SEEK_CUR)  # a hole: it takes no room on the disk
        file.write(b'\n{"a": 1}\n')
    out = python("-c", PEAK, path)
    path.unlink()
    lines, peak_bytes = out.stdout.splitlines()
    assert lines == ("[2, 3]" if name == "a.csv" else "[1, 2, 3]")
    assert int(peak_bytes) < 150 * 10**6


# --- whole .json files -----------------------------------------------------------------------------------------------


def test_a_bad_element_of_an_array_is_named_and_its_neighbours_are_read(read):
    elements = [b'{"a": 1, "a": 2}', b'{"a":\n[NaN]}', b"[{}]", b"1e999", b'{"a": 1e999}', b"1" * 5000]
    *rows, last = read("a.json", b'[{"b": 1},\n' + b",\n".join(elements) + b',\n{"b": 2}]')
    assert last == {"b": 2} and rows[0] == {"b": 1}
    assert [row[0] for row in rows[1:]] == [2, 3, 5, 6, 7, 8]
    assert [row[1][:24] for row in rows[1:]] == [
        "has the key 'a' more tha", "holds NaN, which is not ", "got a JSON list, a JSON ",
        "holds the number 1e999, ", "holds the number 1e999, ", "Exceeds the limit (4300 ",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"a": 1},\n {"a" 2}]', "a.json:2:7: not JSON: Expecting ':' delimiter: '[{\"a\": 1},\\n {\"a\" 2}]'"),
        (b'[{"a": 1}\n {"a": 2}]', "a.json:2:2: not JSON: Expecting ',' or ']': "),
        (b'[{"a": 1},\n]', "a.json:2:1: not JSON: Expecting value: "),
        (b'[{"a": 1},\n{"a": 2', "a.json:2:8: not JSON: Expecting ',' delimiter: "),
        (b"[", "a.json:1:2: not JSON: Expecting value: "),
        (b'[{"a": 1}]\n[]', "a.json:2:1: not JSON: Extra data after the array: "),
        (b'[{"a": 1},\0\0\0', f"a.json:1:11: not JSON: Expecting value: '[{{\"a\": 1}},\\x00\\x00\\x00' ({CUT})"),
        (b'"text"', "a.json:1:1: not JSON: an array of objects is needed: "),
        (b'{"a": 1', "a.json:1:8: not JSON: Expecting ',' delimiter: "),
        (b'[{"a":\n "\xc3\xa9\xe9"}]', "a.json:2: not UTF-8 at byte 5 of the line"),
        (b"[" * 100_000, "a.json: nested too deeply to be read"),
        (b'{"a": 1}', "a.json: got one object with the keys a; an array of objects is needed, or an object with "
         "exactly one list of objects in it (here: none)"),
        (b'{"a": [{}], "b": [{}]}', "a.json: got one object with the keys a, b; an array of objects is needed, or an "
         "object with exactly one list of objects in it (here: a, b)"),
        (b"{" + b", ".join(b'"%d": {}' % i for i in range(99)) + b"}", "a.json: got one object with the keys "
         "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …; an array of objects is needed"),
        (b"[]", "a.json: has no rows"),
        (b" \n", "a.json: has no rows"),
    ],
)  # fmt: skip
def test_broken_json_is_an_error_with_its_place(error_of, data, message):
    assert error_of("a.json", data).startswith(message)


def test_bad_lines_of_json_lines_in_a_json_file_are_bad_rows(read):
    assert read("a.json", b'{"a": 1}\n[]\n') == [{"a": 1}, (2, "got a JSON list, a JSON object is needed")]


# --- CSV -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "lines", "reason"),
    [
        (b"1", 1, "got 1 cells, the header has 2"),
        (b"1,2,3", 1, "got 3 cells, the header has 2"),
        (b'"1\n2\n3"', 3, "got 1 cells, the header has 2"),
        (b'"1" 2,3', 1, "not CSV: ',' expected after '\"' (in line 3)"),
        (b"1,\xe9", 1, "not UTF-8 at byte 3 of the line"),
        (b'1,"\n\xc3\xa9\xe9"', 2, "not UTF-8 at byte 3 of the line"),
        (b"1,\0", 1, CUT),
    ],
)  # fmt: skip
def test_a_bad_record_is_named_and_its_neighbours_are_read(read, row, lines, reason):
    rows = read("a.csv", b"q,a\n1,2\n" + row + b"\n3,4\n5\n")
    expected = [{"q": "1", "a": "2"}, (3, reason), {"q": "3", "a": "4"}]
    assert rows == [*expected, (4 + lines, "got 1 cells, the header has 2")]


def test_a_lone_carriage_return_is_no_end_of_a_record(read):
    (line, reason), good = read("a.csv", b"q,a\n1\r2,3\n4,5\n")
    assert (line, good) == (2, {"q": "4", "a": "5"}) and reason.startswith("not CSV: new-line character seen")


def test_a_quote_that_is_never_closed_is_named_where_it_opens(read):
    assert read("a.csv", b'q,a\n1,2\n1,"2\n3,4\n') == [
        {"q": "1", "a": "2"},
        (3, "not CSV: unexpected end of data (in line 4)"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a,,b\n1,2,3\n", "a.csv:1: the header: name 2 is empty; give each column a name"),
        (
            b"\na,b,a\n1,2,3\n",
            "a.csv:2: the header: the name 'a' is used more than once; give each column its own name",
        ),
        (b'"a"b\n1\n', "a.csv:1: the header cannot be read: not CSV: ',' expected after '\"' (in line 1)"),
        (b"\xe9\n1\n", "a.csv:1: the header cannot be read: not UTF-8 at byte 1 of the line"),
        (b"a,b\n\n", "a.csv: has no rows"),
    ],
)
def test_a_header_that_cannot_be_used_is_an_error(error_of, data, message):
    assert error_of("a.csv", data) == message


# --- Parquet and text ------------------------------------------------------------------------------------------------


def test_a_broken_parquet_file_is_an_error(error_of, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [f"{i}" * 100 for i in range(5000)]}), tmp_path / "good.parquet")
    data = (tmp_path / "good.parquet").read_bytes()
    assert error_of("a.parquet", b"PAR1 and no more").startswith("a.parquet: broken Parquet file, after row 0: ")
    assert error_of("a.parquet", data[:-100]).startswith("a.parquet: broken Parquet file, after row 0: ")
    assert error_of("a.parquet", data[:2000] + bytes(2000) + data[4000:]).startswith("a.parquet: ")


def test_text_of_parquet_that_is_none_is_named(error_of, read, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    latin = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xe9"]).buffers())
    pq.write_table(pa.table({"text": latin}), tmp_path / "b.parquet")
    message = error_of("a.parquet", (tmp_path / "b.parquet").read_bytes())
    assert message.startswith("a.parquet: broken Parquet file, after row 0: 'utf-8' codec can't decode byte 0xe9")
    pq.write_table(pa.table({"j": pa.array(["{}", "{", None], pa.json_())}), tmp_path / "j.parquet")
    first, (line, reason), last = read("a.parquet", (tmp_path / "j.parquet").read_bytes())
    assert (first, line, last) == ({"j": {}}, 2, {"j": None}) and reason.startswith("column 'j': not usable JSON: ")


def test_parquet_without_pyarrow_says_what_to_install(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentFault, match=r"needs pyarrow. Install it with: pip install 'dualtune\[datasets\]'"):
        read("a.parquet", b"")


def test_a_block_of_text_that_is_none_is_named(read):
    line = b"x" * (TEXT_BLOCK // 2 - 1) + b"\n"  # two of them fill a block
    bad = b"x" * (TEXT_BLOCK // 2 - 2) + b"\xe9\n"
    assert read("a.txt", line + line + line + bad + line + line + b"good\n\0\0") == [
        {"text": (line + line).decode()},
        (3, f"not UTF-8 at byte {TEXT_BLOCK // 2 - 1} of line 4"),
        {"text": (line + line).decode()},
        (7, CUT),
    ]
    assert read("b.txt", b"\xe9" * TEXT_BLOCK + line) == [(1, "not UTF-8 at byte 1 of line 1"), {"text": line.decode()}]


# --- whole files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.md", "a.ndjson", "a.jsonl.gz"])
@pytest.mark.parametrize("data", [b"", b"\n \n", codecs.BOM_UTF8], ids=["empty", "blank", "only a mark"])
def test_a_file_without_rows_is_an_error(error_of, name, data):
    if data.strip(b"\n") == b" " and name in ("a.csv", "a.tsv"):
        data = b"\n\n"  # a blank is a name there
    assert error_of(name, gzip.compress(data) if name.endswith("gz") else data) == f"{name}: has no rows"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32", "UTF-16LE", "UTF-16BE"])
def test_another_unicode_is_an_error_with_the_way_out(error_of, name, encoding):
    data = '{"a": 1}\n'.encode(encoding)
    assert error_of(name, gzip.compress(data) if name.endswith("gz") else data) == (
        f"{name}: got {encoding}, UTF-8 is needed. Convert it: iconv -f {encoding} -t UTF-8 '{name}' > new.file"
    )


def test_broken_gzip_is_an_error_behind_its_good_rows(tmp_path, error_of):
    whole = gzip.compress(b"".join(b'{"a": "%d"}\n' % (i**7) for i in range(20_000)))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[:-2000])
    rows = open_source(str(path)).rows()
    assert [next(rows).fields["a"] for _ in range(3)] == ["0", "1", "128"]
    with pytest.raises(DataError, match=r"cut.jsonl.gz: broken gzip file .*; create or download it again"):
        list(rows)
    assert error_of("a.jsonl.gz", b"{}\n").startswith("a.jsonl.gz: broken gzip file")
    assert error_of("a.csv.gz", whole[:50] + bytes(50) + whole[100:]).startswith("a.csv.gz: broken gzip file")
    assert error_of("a.json.gz", whole[:-2] + b"\0\0").startswith("a.json.gz: broken gzip file")  # the wrong length
