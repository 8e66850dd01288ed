"""The fields of data rows, found again by their place: for who needs more of a row than its tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import IO, Any

from dualtune.base import interrupt
from dualtune.base.errors import DiskError
from dualtune.data.documents import OpenedSource
from dualtune.data.sources.rows import RawRow


class RowFields:
    """The fields of the rows of sources, by path:line. They are read when one is asked for, into a temporary file."""

    def __init__(self, sources: Iterable[OpenedSource]) -> None:
        self._sources = tuple(sources)

    def __getitem__(self, where: str) -> Mapping[str, Any]:
        """Return the fields of a row, as JSON holds them: what it has no form for, such as a date, is text."""
        file, starts = self._stored
        file.seek(starts[where])
        return json.loads(file.readline())

    @property
    def of_prompts(self) -> list[str]:
        """The names of the sources whose rows have no answer."""
        return [source.files.name for source in self._sources if source.format() == "prompt"]

    def close(self) -> None:
        """Remove the file; it is made again when a row is asked for."""
        if "_stored" in self.__dict__:
            self._stored[0].close()
            del self.__dict__["_stored"]

    @cached_property
    def _stored(self) -> tuple[IO[bytes], dict[str, int]]:
        """The file, and where each row starts in it."""
        starts = dict[str, int]()
        try:
            file = tempfile.TemporaryFile(prefix="dualtune-rows-")  # noqa: SIM115  it is needed as long as this
            for source in self._sources:
                for row in source.files.rows():
                    interrupt.poll()
                    if isinstance(row, RawRow):
                        starts[row.where] = file.tell()
                        file.write(json.dumps(row.fields, default=str).encode() + b"\n")
        except OSError as error:
            raise DiskError(
                f"the rows that rewards ask for cannot be kept in a temporary file: {error.strerror or error}. Free "
                "disk space, or set TMPDIR to a directory on another disk"
            ) from error
        return file, starts
