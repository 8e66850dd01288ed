"""File kinds by suffix, with a reader for each, and the reader of plain text.

A reader takes an open file and yields its rows, bad rows included.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path

from dualtune.data.sources.data_file import HOLDS_NUL, DataFile, Rows, opened
from dualtune.data.sources.json_file import read_json
from dualtune.data.sources.json_rows import read_jsonl
from dualtune.data.sources.parquet import read_parquet
from dualtune.data.sources.rows import BadRow, RawRow
from dualtune.data.sources.tables import read_csv, read_tsv
from dualtune.errors import DataError

TEXT_BLOCK = 1 << 14  # bytes of a plain-text document, several thousand tokens
TELL_ROWS = 1000

Tell = Callable[[float], None]  # called with the fraction read so far, in [0, 1]


def read_file(path: Path, tell: Tell) -> Rows:
    """Yield the rows of a file of a known kind. Raises DataError if it has no rows or cannot be read."""
    number = 0
    with opened(path) as file:
        for number, row in enumerate(READERS[kind_of(path)](file), start=1):
            yield row
            if number % TELL_ROWS == 0:
                tell(file.share())
    if not number:
        raise DataError(f"{path}: has no rows")
    tell(1.0)


def kind_of(path: Path) -> str:
    """Return the suffix that selects the reader, without .gz; "" if it is unknown."""
    name = path.name.lower()
    kind = Path(name.removesuffix(".gz")).suffix
    return kind if kind in READERS and not (kind in TABLES and name.endswith(".gz")) else ""


def read_text(file: DataFile) -> Rows:
    """Split plain text into documents of at most TEXT_BLOCK bytes, at the end of a paragraph, or else of a line.

    A longer line is cut between two characters.
    """
    line, rest = 1, b""
    while block := rest + file.stream.read(TEXT_BLOCK - len(rest)):
        at_end = len(block) < TEXT_BLOCK
        cut = len(block) if at_end else _end_of_paragraph(block)
        piece = block[:cut] if cut else block
        try:
            text, used = codecs.utf_8_decode(piece, "strict", cut > 0)  # no line end: up to the last whole character
            bad = HOLDS_NUL if "\0" in text else ""
        except UnicodeDecodeError as error:
            bad_line = line + piece.count(b"\n", 0, error.start)
            column = error.start - piece.rfind(b"\n", 0, error.start)
            text, used, bad = "", len(piece), f"not UTF-8 at byte {column} of line {bad_line}"
        if bad:
            yield BadRow(file.name, line, bad)
        elif text.strip():
            yield RawRow(file.name, line, {"text": text.replace("\r\n", "\n")})
        line += piece.count(b"\n", 0, used)
        rest = block[used:]


def _end_of_paragraph(block: bytes) -> int:
    """Return the end of the last blank line in the second half, else of the last line; 0 if there is no whole line."""
    for blank in (b"\n\n", b"\n\r\n"):
        if (at := block.rfind(blank, len(block) // 2)) >= 0:
            return at + len(blank)
    return block.rfind(b"\n") + 1


READERS: dict[str, Callable[[DataFile], Rows]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".arrow": read_parquet,
    ".txt": read_text,
    ".text": read_text,
    ".md": read_text,
}
TABLES = (".parquet", ".arrow")  # compressed inside, if at all
KINDS = f"{', '.join(READERS)}; all except {' and '.join(TABLES)} also with .gz appended"
