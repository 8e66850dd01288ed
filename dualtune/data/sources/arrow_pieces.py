"""Split Arrow batches into pieces that need little memory as Python objects.

Also a program: it reads a Parquet or an Arrow file from standard input and writes an Arrow stream of such pieces
to standard output. A thousand bytes of Parquet can unpack to gigabytes, and the library has no limit, so a process with
limited memory reads the file. It imports nothing from dualtune, to start quickly.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

BATCH_ROWS = 1000
PIECE = 16 << 20  # bytes of a piece as Python objects
ROW = 36 << 20  # bytes of one row
OBJECT = 64  # bytes of a small Python value
WIDE = 4  # the most bytes of a character
FAILED = 3  # exit status of a failure; the reason is on standard error
NUM_ROWS = b"dualtune.rows"  # key of the schema's metadata: the number of rows, "0" if the file does not say it
PARQUET, ARROW_FILE = b"PAR1", b"ARROW1"  # the first bytes of such files; an Arrow stream has none of its own
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def pieces(batch: Any) -> Iterator[Any]:
    """Yield the batch in pieces of at most PIECE bytes. A piece without rows replaces a row of more than ROW bytes."""
    size = sum(map(_size, batch.columns))
    if size <= PIECE or (batch.num_rows == 1 and size <= ROW):
        yield batch
    elif batch.num_rows == 1:
        yield batch.slice(0, 0)
    else:
        half = batch.num_rows // 2
        yield from pieces(batch.slice(0, half))
        yield from pieces(batch.slice(half))


def _size(array: Any) -> int:
    """Return an upper bound on the bytes of an array as Python objects."""
    import pyarrow

    types = cast(Any, pyarrow).types
    kind = array.type
    if isinstance(kind, cast(Any, pyarrow).BaseExtensionType):
        return _size(array.storage)
    own = OBJECT * len(array)
    if types.is_struct(kind):
        return own + sum(_size(array.field(i)) for i in range(kind.num_fields))
    if types.is_dictionary(kind):
        return _size(array.dictionary_decode())
    if types.is_nested(kind):
        return own + (_size(array.flatten()) if hasattr(array, "flatten") else WIDE * array.nbytes)
    return own + WIDE * array.nbytes


def main() -> int:
    import pyarrow
    from pyarrow import parquet

    arrow, ParquetFile = cast(Any, pyarrow), cast(Any, parquet).ParquetFile
    arrow.set_memory_pool(arrow.system_memory_pool())
    arrow.set_cpu_count(1)
    _limit_memory(int(sys.argv[1]))
    try:
        source = os.fdopen(0, "rb")
        source.seek(0)  # the parent has looked at the beginning
        head = source.peek(6)[:6]
        if head.startswith(PARQUET):
            # The default settings hold a whole row group in memory, which can be the whole file.
            file = ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
            batches = file.iter_batches(_batch_rows(file.metadata), use_threads=False)
        elif head == ARROW_FILE:
            file = arrow.ipc.open_file(source)
            schema, num_rows = file.schema, 0
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            _check_end(source)
            batches = arrow.ipc.open_stream(source)
            schema, num_rows = batches.schema, 0
        schema = schema.with_metadata((schema.metadata or {}) | {NUM_ROWS: str(num_rows).encode()})
        with os.fdopen(1, "wb") as out, arrow.ipc.new_stream(out, schema) as stream:
            for batch in batches:
                for piece in pieces(batch):
                    stream.write_batch(piece)
    except BrokenPipeError:
        return 0  # the reader needs no more
    except (arrow.ArrowException, OSError, MemoryError, ValueError) as error:
        memory = isinstance(error, MemoryError)
        sys.stderr.write("" if memory else " ".join(str(error).split())[:500])
        return FAILED
    return 0


def _check_end(source: BinaryIO) -> None:
    """Raise ValueError for a stream that was not written to its end: the library would read what there is."""
    source.seek(-min(len(END_OF_STREAM), os.fstat(source.fileno()).st_size), os.SEEK_END)
    if source.read() != END_OF_STREAM:
        raise ValueError("the stream has no end mark, so it is incomplete; write or copy it again")
    source.seek(0)


def _batch_rows(metadata: Any) -> int:
    """Return how many rows to unpack at once, from the sizes recorded in the file."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(BATCH_ROWS, int(PIECE / max(1, largest))))


def _limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more memory; beyond that, allocations fail or the process ends."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        used = 1024 * int(status[status.index("VmData:") :].split()[1])
        resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, used + num_bytes))
        return
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def watch() -> None:
        while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < start + num_bytes:  # in bytes on macOS
            time.sleep(0.01)
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
