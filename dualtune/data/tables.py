"""Tables to rows: CSV and TSV by Python's csv module, Parquet by pyarrow."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from dualtune.data.data_file import HOLDS_NUL, LINE_TOO_LONG, MAX_LINE, DataFile, Rows
from dualtune.data.rows import BadRow, RawRow
from dualtune.errors import DataError, EnvironmentFault

BATCH_ROWS = 1000
INSTALL_DATASETS = "Install it with: pip install 'dualtune[datasets]'"


def read_csv(file: DataFile, delimiter: str = ",") -> Rows:
    """A header, then a row a record; a quoted cell may hold newlines. A row has the number of its first line."""
    csv.field_size_limit(MAX_LINE)
    complaints: list[str] = []  # about the lines of the record that is being read
    reader = csv.reader(_csv_lines(file, complaints), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        complaints.clear()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            cells = []
            complaints.append(f"not CSV: {error} (in line {reader.line_num})")
        if cells is None:
            return
        if header is None:
            if complaints or cells:
                header = _checked_header(file, line, cells, complaints)
        elif complaints:
            yield BadRow(file.name, line, complaints[0])
        elif cells and len(cells) != len(header):
            yield BadRow(file.name, line, f"got {len(cells)} cells, the header has {len(header)}")
        elif cells:  # a blank line has none
            yield RawRow(file.name, line, dict(zip(header, cells, strict=True)))


def read_tsv(file: DataFile) -> Rows:
    """As .csv, quotes included, with tabs between the cells."""
    return read_csv(file, "\t")


def read_parquet(file: DataFile) -> Rows:
    """Rows are numbered from 1. See `arrow_rows` for what becomes of nulls."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentFault(f"{file.path}: reading Parquet needs pyarrow. {INSTALL_DATASETS}") from error
    last = 0
    try:
        # The defaults hold a whole row group in memory, which can be the whole file.
        table = cast(Any, pyarrow.parquet).ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False)
        _check_names(f"{file.path}: the columns", table.schema_arrow.names)
        for row in arrow_rows(file.name, table.iter_batches(BATCH_ROWS)):
            last = row.line
            file.done = last / table.metadata.num_rows
            yield row
    except (cast(Any, pyarrow).ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file.path}: broken Parquet file, behind row {last}: {error}") from error


def arrow_rows(name: str, batches: Iterable[Any]) -> Rows:
    """The rows of Arrow batches or tables, numbered from 1: JSON columns decoded, null fields of objects left out.

    A column of objects has one set of fields for all rows. A null there mostly says that this object never had the
    field, and a chat template could not tell it from one that is meant.
    """
    number = 0
    for batch in batches:
        converters = [(field.name, _converter(field.type)) for field in batch.schema]
        changing = [(column, convert) for column, convert in converters if convert]
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
    """What is still to be done to a value of a type that Arrow has made a Python value; None for nothing."""
    import pyarrow

    types = cast(Any, pyarrow).types
    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return json.loads
    if types.is_struct(arrow_type):
        inner = {field.name: _converter(field.type) or _as_it_is for field in arrow_type}
        return lambda value: {name: inner[name](item) for name, item in value.items() if item is not None}
    is_list = types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type)
    convert = _converter(arrow_type.value_type) if is_list else None
    return convert and (lambda value: [None if item is None else convert(item) for item in value])


def _as_it_is(value: Any) -> Any:
    return value


def _csv_lines(file: DataFile, complaints: list[str]) -> Iterator[str]:
    for _, line in file.lines():
        if line is None:
            complaints.append(LINE_TOO_LONG)
            yield "\n"
            continue
        if b"\0" in line:
            complaints.append(HOLDS_NUL)
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            complaints.append(f"not UTF-8 at byte {error.start + 1} of the line")
            yield line.decode(errors="replace")


def _checked_header(file: DataFile, line: int, names: list[str], complaints: list[str]) -> list[str]:
    if complaints:
        raise DataError(f"{file.path}:{line}: the header cannot be read: {complaints[0]}")
    _check_names(f"{file.path}:{line}: the header", names)
    return names


def _check_names(what: str, names: list[str]) -> None:
    if "" in names:
        raise DataError(f"{what}: name {names.index('') + 1} is empty; give each column a name")
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise DataError(f"{what}: '{repeated[0]}' is there more than once; give each column its own name")
