"""Numbers and tables as text, also where there is little room."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dualtune.text.escape import one_line


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """A line for each row, each column as wide as its widest cell."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def in_bytes(num_bytes: float) -> str:
    """A number of bytes in the largest binary unit that leaves at least one: 1.5 MiB."""
    units = ("B", "KiB", "MiB", "GiB")
    power = next((p for p in range(len(units)) if num_bytes < 1024 ** (p + 1)), len(units) - 1)
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {units[power]}"


def in_time(seconds: float) -> str:
    """12 s, 3 min 05 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def fitted(fields: Sequence[tuple[str, ...]], width: int) -> str:
    """One line of fields, the most important first, each given in its forms from long to short.

    Where there is no room for all, the last ones are shortened, and if that is not enough, left out. The first stays.
    """
    long, short = [forms[0] for forms in fields], [forms[-1] for forms in fields]
    some_short = (long[:i] + short[i:] for i in range(len(fields), -1, -1))
    some_left_out = (short[:i] for i in range(len(fields) - 1, 0, -1))
    lines = ["  ".join(shown) for shown in (*some_short, *some_left_out)]
    return next((line for line in lines if len(line) <= width), lines[-1])


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most `width` columns, broken between words, or behind the commas of too long a word.

    What continues a line begins in its last column, as the value of `label       value` does. A path that is longer
    than a line stays in one piece, to be copied.
    """
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    columns = [gap.end() for gap in re.finditer(r"\S {2,}(?=\S)", line) if gap.end() <= width // 2]
    indent = " " * (columns[-1] if columns else len(line) - len(line.lstrip()) + 2)
    lines = [""]
    for word in re.findall(r"\s*\S+", line):
        for part in re.findall(r".+?,|.+", word) if len(indent) + len(word) > width else [word]:
            if len(lines[-1]) + len(part) <= width or len(lines[-1]) <= len(indent):  # a new line has no more room
                lines[-1] += part
            else:
                lines.append(indent + part.lstrip())
    return "\n".join(lines)
