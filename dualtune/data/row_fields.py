"""The fields of data rows, found again by their place: for who needs more of a row than its tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import IO, Any, NamedTuple

from dualtune.base import interrupt
from dualtune.base.errors import DiskError
from dualtune.data.chat.examples import Example
from dualtune.data.chat.formats import to_examples
from dualtune.data.documents import OpenedSource
from dualtune.data.sources.rows import RawRow


class _Stored(NamedTuple):
    file: IO[bytes]
    places: Mapping[str, tuple[int, int]]  # by path:line: where a row starts in the file, and the number of its source
    columns: Mapping[str, None]  # of all rows


class RowFields:
    """The fields of the rows of sources, by path:line. They are read when one is asked for, into a temporary file."""

    def __init__(self, sources: Iterable[OpenedSource]) -> None:
        self._sources = tuple(sources)

    def __getitem__(self, where: str) -> Mapping[str, Any]:
        """Return the fields of a row, as JSON holds them: what it has no form for, such as a date, is text."""
        file, places, _ = self._stored
        file.seek(places[where][0])
        return json.loads(file.readline())

    def prompt_messages(self, where: str) -> list[dict[str, Any]] | None:
        """Return the messages before the last answer of a row; None if it has texts in place of messages."""
        path, _, line = where.rpartition(":")
        row = RawRow(path, int(line), dict(self[where]))
        example = next(to_examples([row], *self._sources[self._stored.places[where][1]].layout))
        if not isinstance(example, Example) or example.prompt is not None:
            return None
        if example.is_prompt:
            return [message.as_dict() for message in example.messages]
        answers = [n for n, each in enumerate(example.messages) if each.role == "assistant" and each.train]
        return [message.as_dict() for message in example.messages[: answers[-1]]]

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order in which rows have them."""
        return list(self._stored.columns)

    @property
    def of_prompts(self) -> list[str]:
        """The names of the sources whose rows have no answer."""
        return [source.files.name for source in self._sources if source.format() == "prompt"]

    def close(self) -> None:
        """Remove the file; it is made again when a row is asked for."""
        if "_stored" in self.__dict__:
            self._stored.file.close()
            del self.__dict__["_stored"]

    @cached_property
    def _stored(self) -> _Stored:
        places, columns = dict[str, tuple[int, int]](), dict[str, None]()
        try:
            file = tempfile.TemporaryFile(prefix="dualtune-rows-")  # noqa: SIM115  it is needed as long as this
            for number, source in enumerate(self._sources):
                for row in source.files.rows():
                    interrupt.poll()
                    if isinstance(row, RawRow):
                        places[row.where] = (file.tell(), number)
                        columns.update(dict.fromkeys(row.fields))
                        file.write(json.dumps(row.fields, default=str).encode() + b"\n")
        except OSError as error:
            raise DiskError(
                f"the rows that rewards ask for cannot be kept in a temporary file: {error.strerror or error}. Free "
                "disk space, or set TMPDIR to a directory on another disk"
            ) from error
        return _Stored(file, places, columns)
