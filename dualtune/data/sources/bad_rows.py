"""Handle rows that cannot be used: report them in an error, or skip them up to a limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from dualtune.data.sources.rows import BadRow, printable
from dualtune.errors import DataError

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
    first: list[str] = field(default_factory=lambda: [])

    def sift(self, rows: Iterable[Good | BadRow]) -> Iterator[Good]:
        """Yield the good rows of a stream, and record the bad ones."""
        for row in rows:
            if isinstance(row, BadRow):
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
