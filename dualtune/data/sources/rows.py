"""Rows on their way from files to documents. Rows stream: nothing here needs all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RawRow:
    """What a file says, as a mapping."""

    path: str
    line: int  # from 1; the number of the row where the format has no lines
    fields: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. It flows with the good ones; who consumes them decides what it means."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def printable(text: str) -> str:
    """The text with what a terminal could take for a command written out: \\x1b."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class RowError(Exception):
    """Why one row cannot be used; becomes a BadRow."""
