"""The readers of data files for the fuzzer: JSON lines, JSON, CSV, Parquet and plain text, compressed ones too."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

from dualtune.data.sources.readers import open_source
from dualtune.data.sources.rows import BadRow

ROWS = [{"prompt": f"{i} é \U0001f999", "completion": [{"a": "x", "b": i / 3}], "n": None} for i in range(20)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
TABLE = b"prompt,completion\n" + b'"a\n""b""",c\n' * 20
TEXT = "a line\n\nand a paragraph \U0001f999\n".encode() * 40


def text_seeds() -> list[dict[str, bytes]]:
    """A file of each kind; the array twice, also within an object."""
    return [
        {"a.jsonl": LINES}, {"a.jsonl.gz": gzip.compress(LINES)}, {"a.csv": TABLE}, {"a.txt": TEXT},
        {"a.json": json.dumps(ROWS).encode()}, {"a.json.gz": gzip.compress(json.dumps({"v": 1, "r": ROWS}).encode())},
        {"b.JSON": LINES}, {"a.tsv": TABLE.replace(b",", b"\t")},
    ]  # fmt: skip


def parquet_seeds() -> list[dict[str, bytes]]:
    import pyarrow
    from pyarrow import parquet

    files: list[dict[str, bytes]] = []
    for compression in ("none", "zstd"):
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), out := io.BytesIO(), compression=compression)
        files.append({"a.parquet": out.getvalue()})
    return files


def read_data(place: Path, out: Path, draw: random.Random) -> None:
    """Every row has a place, and a bad one a reason in one line."""
    del out, draw
    (path,) = place.iterdir()
    for row in open_source(str(path)).rows():
        assert row.path == str(path) and row.line >= 1
        assert not isinstance(row, BadRow) or (row.reason and "\n" not in row.reason and len(row.reason) < 2000)


# Parquet is read by a process for each file, which takes too long for a hundred thousand: `--only parquet` runs it.
DATA_SEEDS: dict[str, Callable[[], list[dict[str, bytes]]]] = {"data": text_seeds, "parquet": parquet_seeds}
