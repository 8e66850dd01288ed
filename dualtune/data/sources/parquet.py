"""Read rows of Parquet and Arrow files in a separate process: see `arrow_pieces`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from dualtune.data.sources import arrow_pieces
from dualtune.data.sources.data_file import DataFile, Rows
from dualtune.data.sources.tables import INSTALL_DATASETS, arrow_rows, check_names
from dualtune.errors import DataError, EnvironmentFault

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
