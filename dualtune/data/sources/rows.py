"""Rows between files and documents. They are streamed, never all in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dualtune.base.errors import DataError


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


class Tie(BadRow):
    """Two answers of which neither is better: nothing to learn, and no fault. Such rows are left out and counted."""


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


class TieError(RowError):
    """The reason why a row is a Tie."""


# ----------------------------------------------------------------------------------------------------------------------
# Handle rows that cannot be used: report them in an error, or skip them up to a limit.

SHOWN = 5
Good = TypeVar("Good")


def advice_for(reasons: Iterable[str]) -> str:
    """Return advice for bad rows with these reasons, or "" if there is no general advice."""
    if any("not UTF-" in reason for reason in reasons):
        return "If the file is Latin-1: iconv -f LATIN1 -t UTF-8 FILE > new.file"
    return ""


@dataclass(slots=True)
class BadRows:
    """Counts bad rows and keeps the first ones."""

    count: int = 0
    num_ties: int = 0  # which are not among them
    first: list[str] = field(default_factory=lambda: [])

    def sift(self, rows: Iterable[Good | BadRow]) -> Iterator[Good]:
        """Yield the good rows of a stream, and record the bad ones."""
        for row in rows:
            if isinstance(row, Tie):
                self.num_ties += 1
            elif isinstance(row, BadRow):
                self.count += 1
                if len(self.first) < SHOWN:
                    self.first.append(str(row))
            else:
                yield row


def check_bad_rows(count: int, first: Iterable[str], num_good: int, *, skip: bool, limit: float) -> None:
    """Raise DataError unless bad rows may be skipped and do not exceed `limit` (below 1: a share, else a number)."""
    num_rows = num_good + count
    if not count or (skip and num_good and count <= (limit * num_rows if limit < 1 else limit)):
        return
    shown = list(first)[:SHOWN]
    more = f"\n… and {count - len(shown)} more" if count > len(shown) else ""
    if not skip:
        advice = "Fix or remove them, or set data.on_bad_row: skip. `dualtune check-data` lists all of them."
    elif num_good:
        advice = f"That is more than data.max_bad_rows = {limit:g}. Fix the rows, or raise the limit."
    else:
        advice = "No usable row is left. Fix the rows."
    text = "\n".join(map(printable, shown))
    raise DataError(f"{text}{more}\n{count} of {num_rows} rows cannot be used. {advice} {advice_for(shown)}".rstrip())
