"""SQL judged by what it answers: a query is right if SQLite gives the rows that the expected one gives."""

from __future__ import annotations

import sqlite3
from functools import cached_property
from pathlib import Path
from typing import Any

MAX_STEPS = 1_000_000  # of SQLite's virtual machine: a query that joins tables with themselves would not end
MAX_ROWS = 1000
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


class SqlJudge:
    """Executes queries on the database in memory that a script of SQL makes."""

    def __init__(self, script: Path) -> None:
        self._script = script

    def answer(self, query: str) -> list[tuple[Any, ...]] | None:
        """Return the first rows of a query; None if SQLite does not execute it."""
        self._database.set_progress_handler(lambda: 1, MAX_STEPS)
        try:
            return self._database.execute(query).fetchmany(MAX_ROWS)
        except (sqlite3.Error, sqlite3.Warning, ValueError):  # ValueError: a NUL or a lone surrogate in the text
            return None

    def in_words(self, query: str) -> str:
        """Return SQLite's answer as a line."""
        rows = self.answer(query)
        if rows is None:
            return "an error of SQLite"
        values = ", ".join(" ".join(map(str, row)) for row in rows[:5])
        return f"{values}, …" if len(rows) > 5 else values or "no rows"

    def score(self, expected: str, got: str) -> bool:
        """Return whether a query gives the expected rows. Their order counts only if the expected query sets one."""
        expected_rows, rows = self.answer(expected), self.answer(got)
        if rows is None or expected_rows is None:
            return False
        order = list if "ORDER BY" in expected else sorted
        return order(map(repr, rows)) == order(map(repr, expected_rows))

    @cached_property
    def _database(self) -> sqlite3.Connection:
        database = sqlite3.connect(":memory:")
        database.executescript(self._script.read_text(encoding="utf-8"))

        def authorize(action: int, *_: str | None) -> int:
            return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY

        # What a model writes is executed here, so it may read these tables and do nothing else.
        database.set_authorizer(authorize)
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)  # bytes of a value, which a function can make large
        return database
