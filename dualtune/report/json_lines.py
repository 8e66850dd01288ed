"""A JSON Lines file of a run, as a page shows it: a damaged row, or a damaged file, costs itself and is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dualtune.errors import FormatError
from dualtune.io.untrusted import open_file
from dualtune.report.page import notice

T = TypeVar("T")


def read_lines(path: Path, parse: Callable[[bytes, str], T], *, max_bytes: int, max_line: int) -> tuple[list[T], str]:
    """Return the rows, and a notice as HTML on what is left out, empty if nothing is.

    `parse(line, where)` raises FormatError for a line that is no row. A line of more than `max_line` bytes is several.
    """
    rows: list[T] = []
    problem, num_problems = "", 0
    number = 0
    try:
        with open_file(path, max_bytes=max_bytes, is_own=True) as file:
            while line := file.readline(max_line):
                number += 1
                try:
                    rows += [parse(line, f"{path.name}:{number}")] if line.strip() else []
                except FormatError as error:
                    problem, num_problems = problem or str(error), num_problems + 1
    except FormatError as error:
        return rows, notice(str(error))
    except OSError as error:
        return rows, notice(f"{path}: cannot be read: {error.strerror or error}")
    return rows, notice(f"{problem}. Rows left out: {num_problems:,}") if problem else ""
