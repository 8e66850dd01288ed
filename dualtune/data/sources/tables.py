"""Read rows from tables: CSV and TSV with Python's csv module, and Arrow batches."""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import DataError, EnvironmentFault
from dualtune.data.sources import arrow_pieces
from dualtune.data.sources.data_file import HOLDS_NUL, LINE_TOO_LONG, MAX_LINE, DataFile, Rows
from dualtune.data.sources.rows import BadRow, RawRow, TableObject, printable

MAX_COLUMNS = 10_000
MAX_CELLS = 200_000  # the most delimiters in a record, including those within quotes
ROW_TOO_LARGE = f"row of more than {MAX_LINE >> 20} MiB, or of too many small parts; split it"
INSTALL_DATASETS = "Install it with: pip install 'dualtune[datasets]'"


def read_csv(file: DataFile, delimiter: str = ",") -> Rows:
    """Read a header and one row per record. A quoted cell may contain newlines; a row has its first line's number."""
    csv.field_size_limit(MAX_LINE)
    errors: list[str] = []  # about the lines of the current record
    lines = _Record(_csv_lines(file, errors), delimiter)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    # `errors` is filled by the lines that the csv module asks for, so it is about the record that it returns next.
    while True:
        line = reader.line_num + 1
        errors.clear()
        lines.size = lines.cells = 0
        try:
            cells = next(reader, None)
        except csv.Error as error:
            cells = []
            errors.append(f"not CSV: {error} (in line {reader.line_num})")
        if cells is None:
            return
        if header is None:
            if errors or cells:
                header = _checked_header(file, line, cells, errors)
        elif errors:
            yield BadRow(file.name, line, errors[0])
        elif cells and len(cells) != len(header):
            yield BadRow(file.name, line, f"got {len(cells)} cells, the header has {len(header)}")
        elif cells:  # a blank line has no cells
            yield RawRow(file.name, line, dict(zip(header, cells, strict=True)))


def arrow_rows(name: str, batches: Iterable[Any]) -> Rows:
    """Yield the rows of Arrow batches or tables, numbered from 1, with JSON columns decoded and null fields omitted.

    A batch without rows replaces a row that is too large to read (`arrow_pieces`).

    A column of objects has one set of fields for all rows. A null usually means that the object never had the field,
    and a chat template cannot distinguish it from an intended null. `TableObject.full` has them for those who can.
    """
    number = 0
    for batch in batches:
        converters = [(field.name, _converter(field.type)) for field in batch.schema]
        changing = [(column, convert) for column, convert in converters if convert]
        if not batch.num_rows:
            number += 1
            yield BadRow(name, number, ROW_TOO_LARGE)
        for fields in batch.to_pylist():
            number += 1
            row = RawRow(name, number, fields)
            for column, convert in changing:
                try:
                    fields[column] = None if fields[column] is None else convert(fields[column])
                except (ValueError, RecursionError) as error:
                    row = BadRow(name, number, f"column '{column}': not usable JSON: {error}")
            yield row


def _converter(arrow_type: Any) -> Callable[[Any], Any] | None:
    """Return a function that completes the conversion of this type's Python values; None if none is needed."""
    import pyarrow

    types = cast(Any, pyarrow).types
    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return json.loads
    if types.is_struct(arrow_type):
        inner = {field.name: _converter(field.type) for field in arrow_type}

        def convert_object(value: dict[str, Any]) -> dict[str, Any]:
            fields = value.copy()
            for key, convert in inner.items():
                if convert and fields[key] is not None:
                    fields[key] = convert(fields[key])
            return TableObject(fields) if None in fields.values() else fields

        return convert_object
    is_list = types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type)
    convert = _converter(arrow_type.value_type) if is_list else None
    return convert and (lambda value: [None if item is None else convert(item) for item in value])


class _Record:
    """Lines for the csv module, with a limit on the size of a record."""

    def __init__(self, lines: Iterator[str], delimiter: str) -> None:
        self._lines, self._delimiter = lines, delimiter
        self.size = self.cells = 0  # of the current record so far

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next line. Raises csv.Error if the record gets too large; the rest is read as the next record."""
        line = next(self._lines)
        self.size += len(line)
        self.cells += line.count(self._delimiter)
        if self.size > MAX_LINE or self.cells > MAX_CELLS:
            raise csv.Error(f"record of more than {MAX_LINE >> 20} MiB or {MAX_CELLS} cells")
        return line


def _csv_lines(file: DataFile, errors: list[str]) -> Iterator[str]:
    for _, line in file.lines():
        if line is None:
            errors.append(LINE_TOO_LONG)
            yield "\n"
            continue
        if b"\0" in line:
            errors.append(HOLDS_NUL)
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            errors.append(f"not UTF-8 at byte {error.start + 1} of the line")
            yield line.decode(errors="replace")


def _checked_header(file: DataFile, line: int, names: list[str], errors: list[str]) -> list[str]:
    if errors:
        raise DataError(f"{file.path}:{line}: the header cannot be read: {errors[0]}")
    other = next((mark for mark in (";", "\t") if len(names) == 1 and mark in names[0]), None)
    if other:
        convert = "csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter=';'))"
        advice = (
            "Rename it to .tsv"
            if other == "\t"
            else f'Convert it: python3 -c "import csv, sys; {convert}" < FILE > new.csv'
        )
        raise DataError(f"{file.path}:{line}: cells are separated by {other!r}, in a .csv file ',' is needed. {advice}")
    # pandas writes its row numbers as a first column without a name; the notice about them comes with the rows.
    check_names(f"{file.path}:{line}: the header", names[1:] if names[:1] == [""] and len(names) > 1 else names)
    return names


def check_names(where: str, names: list[str]) -> None:
    """Raise DataError for columns without a name, for duplicate names, and for too many columns."""
    if len(names) > MAX_COLUMNS:
        raise DataError(
            f"{where}: {len(names)} names, at most {MAX_COLUMNS} are allowed; remove those that are not needed"
        )
    if "" in names:
        raise DataError(f"{where}: name {names.index('') + 1} is empty; give each column a name")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"{where}: the name '{printable(repeated[0])}' is used more than once; give each column its own name"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Read rows of Parquet and Arrow files in a separate process: see `arrow_pieces`.

MAX_MEMORY = 192 << 20  # bytes to read a file, beyond what the library itself needs


def read_parquet(file: DataFile) -> Rows:
    """Yield the rows, numbered from 1. See `arrow_rows` for the handling of nulls."""
    try:
        import pyarrow
    except ImportError as error:
        raise EnvironmentFault(
            f"{file.path}: reading Parquet and Arrow files needs pyarrow. {INSTALL_DATASETS}"
        ) from error
    last = 0
    try:
        with _stream(file) as stream:
            schema = stream.schema
            check_names(f"{file.path}: the columns", schema.names)
            num_rows = int(schema.metadata[arrow_pieces.NUM_ROWS])
            for row in arrow_rows(file.name, stream):
                last = row.line
                file.done = last / num_rows if num_rows else None
                yield row
    except (cast(Any, pyarrow).ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "Arrow" if file.path.suffix.lower() == ".arrow" else "Parquet"
        raise DataError(f"{file.path}: broken {kind} file, after row {last}: {error}") from error


@contextlib.contextmanager
def _stream(file: DataFile) -> Generator[Any]:
    """Open the file as a stream of Arrow batches. Raises OSError with the reason if reading fails."""
    import pyarrow
    from pyarrow import ipc

    # -P: modules in the program's folder must not shadow the standard library.
    command = [sys.executable, "-P", str(Path(arrow_pieces.__file__)), str(MAX_MEMORY)]
    with subprocess.Popen(command, stdin=file.raw, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            try:
                stream = cast(Any, ipc).open_stream(child.stdout)
                yield stream
            except cast(Any, pyarrow).ArrowException as error:
                raise OSError(_reason(child) or str(error)) from error
            if reason := _reason(child):
                raise OSError(reason)
        finally:
            child.kill()


def _reason(child: subprocess.Popen[bytes]) -> str:
    """Return why the reading process failed; "" if it succeeded."""
    assert child.stderr is not None
    reason = child.stderr.read(2000).decode(errors="replace")
    if child.wait() == 0:
        return ""
    too_large = f"it takes more than {MAX_MEMORY >> 20} MiB to read. Write it with smaller pages, or as JSON lines"
    return reason if child.returncode == arrow_pieces.FAILED and reason else too_large
