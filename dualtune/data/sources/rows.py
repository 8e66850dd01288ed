"""Rows between files and documents. They are streamed, never all in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row of a file, as a mapping."""

    path: str
    line: int  # from 1; the row number if the format has no lines
    fields: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. It is streamed with the good ones; the consumer decides how to handle it."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def printable(text: str) -> str:
    """Escape characters that a terminal could interpret as a command, for instance \\x1b."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class TableObject(dict[str, Any]):
    """An object of a table without its nulls. `full` has them: a table has one for each key of other rows' objects."""

    def __init__(self, full: dict[str, Any]) -> None:
        super().__init__({key: item for key, item in full.items() if item is not None})
        self.full = full


class RowError(Exception):
    """The reason why a row cannot be used; becomes a BadRow."""
