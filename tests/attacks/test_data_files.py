"""Hostile data files: each is read within a bound of memory, or refused in one line, and nothing is waited for."""

import gzip
import io
import json
import os
import sys

import pytest

from dualtune.base.errors import DataError
from dualtune.data.sources.readers import open_source

MIB = 1 << 20
# Reads the files in turn, each from scratch; VmHWM is reset before each.
READ = """
import json, re, sys
from pathlib import Path
from dualtune.data.sources.readers import open_source
from dualtune.base.errors import DataError

def peak(reset=False):
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(re.search(r"VmHWM:\\\\s+(\\\\d+) kB", Path("/proc/self/status").read_text())[1])

for name in sys.argv[1:]:
    before, rows, bad, reason = peak(reset=True), 0, 0, ""
    try:
        source = open_source(name)
        source.identity()
        for row in source.rows():
            rows += 1
            if hasattr(row, "reason"):
                bad, reason = bad + 1, row.reason
    except DataError as error:
        reason = str(error)
    print(json.dumps([peak() - before, rows, bad, reason]))
"""
READ = READ.replace("\\\\", "\\")
BYTE4 = "\U0001f999".encode()  # makes each character of its text take four bytes


def dense(item: bytes, num_bytes: int) -> bytes:
    return b'{"a":[' + item * (num_bytes // len(item)) + b"1]}\n"


def wide(num_bytes: int) -> bytes:
    return b'{"a":"' + BYTE4 + b"y" * (num_bytes - 20) + b'"}\n'


ROW = 3 * MIB
FILES = {  # name -> content, what is said of it, and whether rows are read all the same
    "wide.jsonl": (lambda: wide(ROW) * 3, "", True),
    "wide.json": (lambda: b"[" + b",".join([wide(ROW)] * 3) + b"]", "", True),
    "a-list-of-lists.jsonl": (lambda: dense(b"[],", ROW - 100) + b"{}\n", "too many small parts", True),
    "dense.jsonl": (lambda: dense(b'{"a":1},', 400_000) * 3, "", True),
    "pairs.jsonl": (lambda: (b"{" + b",".join(b'"%06x":1' % i for i in range(70_000)) + b"}\n") * 3, "", True),
    "line.jsonl": (lambda: wide(16 * MIB) + b"{}\n", "line of more than 3 MiB", True),
    "element.json": (lambda: b"[{}," + wide(16 * MIB) + b"]", "element.json:1: an element of more than 3 MiB", True),
    "small-parts.json": (lambda: b"[" + dense(b"[],", 2 * MIB) + b"]", "or of too many small parts", False),
    "deep.json": (lambda: b'[{"a":' + b"[" * 8 * MIB, "nested too deeply to be read", False),
    "whole.json": (lambda: b"[" + b",".join([b'{"a":"b"}'] * 300_000) + b"]", "", True),
    "bomb.json.gz": (lambda: gzip.compress(b'[{"a":"' + bytes(100 * MIB) + b'"}]'), "of more than 3 MiB", False),
    "bomb.jsonl.gz": (lambda: gzip.compress(bytes(100 * MIB)), "expands to more than 250 times its size", False),
    "bomb.txt.gz": (lambda: gzip.compress(b"\n" * 100 * MIB), "expands to more than 250 times its size", False),
    "columns.csv": (lambda: b",".join(b"c%d" % i for i in range(150_000)) + b"\n1\n", "at most 10000 are", False),
    "long-header.csv": (lambda: b",".join(b"c%d" % i for i in range(1_000_000)) + b"\n", "cannot be read", False),
    "cells.csv": (lambda: b"a,b\n" + b"aa," * 900_000 + b"\n1,2\n", "or 200000 cells", True),
    "record.csv": (lambda: b"a,b\n" + b'"x\n",' * 300_000 + b"\n", "unexpected end of data", True),
    "wide.csv": (lambda: b"a,b\n" + (b'"\n' + BYTE4 + b"y" * (ROW - 20) + b'",1\n') * 3, "", True),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_file_takes_more_than_64_mib_to_read(tmp_path, python):
    """A line of 63 MiB took 1.8 GB, five megabytes of .json.gz more than ten."""
    (tmp_path / "first.jsonl").write_bytes(b"{}\n")
    for name, (content, _, _) in FILES.items():
        (tmp_path / name).write_bytes(content())
    done = python("-c", READ, "first.jsonl", *FILES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = dict(zip(FILES, map(json.loads, done.stdout.splitlines()[1:]), strict=True))
    for name, (_, said, has_rows) in FILES.items():
        growth, rows, bad, reason = found[name]
        assert growth <= 64 * MIB, (name, growth)
        assert said in reason and bool(said) == bool(reason) and "\n" not in reason, (name, reason)
        assert (rows > bad or bad == rows > 0) if has_rows else rows == bad, (name, rows, bad)


def parquets():
    """Files of at most some kilobytes that unpack to hundreds of megabytes, and what is said of each."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def of(array) -> bytes:
        out = io.BytesIO()
        pq.write_table(pa.table({"text": array}), out, compression="zstd")
        return out.getvalue()

    one = pa.array([0] * 50_000, pa.int32())
    nothing = pa.ListArray.from_arrays(pa.array([0, 30 * MIB], pa.int32()), pa.nulls(30 * MIB))
    ones = pa.ListArray.from_arrays(pa.array([0, MIB], pa.int32()), pa.array([True] * MIB))
    return {
        "dictionary.parquet": (of(pa.DictionaryArray.from_arrays(one, ["y" * 6 * MIB])), "more than 192 MiB to read"),
        "nulls.parquet": (of(nothing), "more than 192 MiB to read"),
        "page.parquet": (of(pa.array(["y" * 200 * MIB])), "more than 192 MiB to read"),
        "row.parquet": (of(pa.array(["y" * 12 * MIB, "good"])), "row of more than 3 MiB"),
        "ones.parquet": (of(ones), "row of more than 3 MiB, or of too many small parts"),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_parquet_file_takes_more_than_256_mib_to_read(tmp_path, python):
    """One of 812 bytes took 6.5 GB: a value of some megabytes that every row repeats."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "first.parquet")
    files = parquets()
    for name, (content, _) in files.items():
        assert len(content) < 100_000
        (tmp_path / name).write_bytes(content)
    children = "\nimport resource\nprint(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    first = python("-c", READ + children, "first.parquet", cwd=tmp_path).stdout.splitlines()
    done = python("-c", READ + children, "first.parquet", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, *lines, in_child = done.stdout.splitlines()
    for (name, (_, said)), (growth, _, _, reason) in zip(files.items(), map(json.loads, lines), strict=True):
        assert said in reason, (name, reason)
        assert growth <= 64 * MIB, (name, growth)
    assert int(in_child) - int(first[-1]) <= 192 * MIB


def test_rows_behind_a_row_that_is_too_large_are_read(tmp_path):
    files = parquets()
    (tmp_path / "a.parquet").write_bytes(files["row.parquet"][0])
    bad, good = open_source(str(tmp_path / "a.parquet")).rows()
    assert (bad.line, bad.reason[:25]) == (1, "row of more than 3 MiB, o")
    assert (good.line, good.fields) == (2, {"text": "good"})


@pytest.mark.parametrize("kind", ["pipe", "endless", "empty"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.json.gz", "train.csv", "train.txt", "train.parquet"])
def test_what_is_no_regular_file_is_never_waited_for(tmp_path, kind, name):
    """A pipe without a writer once held the reader for ever, and a link to /dev/zero gave it bytes without end."""
    path = tmp_path / "set" / name
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to("/dev/null")
    for read in (lambda source: source.identity(), lambda source: list(source.rows())):
        with pytest.raises(DataError, match=rf"{name}: (is not a regular file|cannot be read)"):
            read(open_source(str(path.parent)))


def test_text_that_is_dense_with_commas_and_brackets_is_read(tmp_path):
    """Only structure is counted, not what looks like it within a string."""
    rows = [{"text": "f([x, y], {a: b}); " * 150_000}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (tmp_path / "b.json").write_text(json.dumps(rows))
    for name in ("a.jsonl", "b.json"):
        (row,) = open_source(str(tmp_path / name)).rows()
        assert row.fields == rows[0]


@pytest.mark.parametrize("size", [1000, 65_530, 300_000, 1_000_000])
def test_elements_of_any_length_are_read_across_the_borders_of_what_is_read_at_once(tmp_path, size):
    quotes = 'é"\\{[' * (size // 6)
    rows = [{"a": quotes, "i": i, "n": [{"deep": [1.5, None]}] * i} for i in range(5)]
    for name, text in (
        ("a.json", json.dumps(rows, ensure_ascii=False)),
        ("b.json", json.dumps({"v": 1, "rows": rows})),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert [row.fields for row in open_source(str(tmp_path / name)).rows()] == rows
