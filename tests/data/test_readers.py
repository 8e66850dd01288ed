"""Files to rows: what is read, and how every kind of broken file is named with its line."""

import json

import pytest

from dualtune.data.readers import read_rows
from dualtune.errors import DataError


def error_of(path) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert caught.value.exit_code == 3
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    def write(data: bytes, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def test_rows_come_with_their_file_and_line(file):
    path = file(b'{"a": 1}\n\n  \n{"a": "\xc3\xa9"}')
    assert [(row.where, row.fields) for row in read_rows(path)] == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:4", {"a": "é"}),
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_byte_order_marks_and_windows_lines_are_accepted(file, newline, mark):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ("eins", "zwei\u2028drei")]
    rows = read_rows(file((mark + newline.join(lines) + newline).encode()))
    assert [row.fields["text"] for row in rows] == ["eins", "zwei\u2028drei"]  # U+2028 ends no line


def test_ndjson_is_the_same_thing(file):
    assert len(read_rows(file(b"{}\n{}\n", "rows.ndjson"))) == 2


def test_a_line_that_is_not_json_is_named_with_its_column(file):
    path = file(b'{"a": 1}\n{"a": 1}, "b"\n{"a": 2}\n')
    assert error_of(path).splitlines() == [
        f'{path}:2: not JSON: Extra data at column 9: \'{{"a": 1}}, "b"\'',
        "1 of 3 rows cannot be used. Mend or remove them.",
    ]


def test_the_first_five_problems_are_shown_and_all_are_counted(file):
    path = file(b'{"a": 1}\n' + b"[1]\n" * 7)
    *shown, more, count = error_of(path).splitlines()
    assert shown == [f"{path}:{n}: got a JSON list, a JSON object is needed" for n in range(2, 7)]
    assert (more, count) == ("… and 2 more", "7 of 8 rows cannot be used. Mend or remove them.")


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b"\x00", b'{"a": "half', b"{'a': 1}", b"NaN"],
    ids=["deep", "long number", "NUL", "cut", "Python", "NaN"],
)  # fmt: skip
def test_hostile_lines_are_named_too(file, line):
    path = file(b'{"a": 1}\n' + line + b"\n")
    assert error_of(path).startswith(f"{path}:2: ")
    assert error_of(path).endswith("1 of 2 rows cannot be used. Mend or remove them.")


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_rows(file, data):
    path = file(data)
    assert error_of(path) == f"{path}: has no rows"


def test_a_file_that_is_not_utf_8(file):
    path = file('{"a": "é"}\n'.encode("latin-1"))
    assert error_of(path) == f"{path}: not UTF-8 (byte 7); convert it, for example with iconv"
    assert "not UTF-8" in error_of(file('{"a": 1}\n'.encode("utf-16")))


def test_a_missing_file_a_directory_and_another_suffix(file, tmp_path):
    assert error_of(tmp_path / "no.jsonl") == f"{tmp_path}/no.jsonl: no such file; a .jsonl file is needed"
    assert error_of(tmp_path) == f"{tmp_path}: is a directory; a .jsonl file is needed"
    path = file(b"a,b\n", "rows.csv")
    assert error_of(path) == f"{path}: got a '.csv' file, allowed: .jsonl (one JSON object a line)"
    assert "got a 'suffixless' file" in error_of(file(b"{}\n", "rows"))
