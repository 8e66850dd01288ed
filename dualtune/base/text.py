"""Text for terminals and pages: untrusted text escaped, tables in columns, numbers with units, did you mean …?

`dualtune --help` imports this, so rich is imported where columns are measured.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import zip_longest

# Control characters except tab and newline; bidirectional controls; zero-width characters and line separators; tag
# characters; fillers that look like spaces; lone surrogates, as in file names that are not UTF-8.
_UNSEEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_JOINERS = r"\u200c\u200d"  # used in Persian, Hindi and emoji: allowed if both neighbors are of such a script
_OTHER_SCRIPT = r"[^\x00-\x7f]"
_TO_ESCAPE = re.compile(rf"[{_UNSEEN}]|(?<!{_OTHER_SCRIPT})[{_JOINERS}]|[{_JOINERS}](?!{_OTHER_SCRIPT})")


def visible(text: str) -> str:
    r"""Replace invisible characters and terminal controls by a symbol (␛) or a JSON escape (\u202e)."""
    return _TO_ESCAPE.sub(_code, text)


def one_line(text: str) -> str:
    """Escape like `visible`, and also tabs and newlines: for a name or a table cell."""
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def _code(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format a table with one line per row; each column is as wide as its widest cell."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def side_by_side(left: str, right: str, width: int = 56) -> str:
    """Format two texts in columns of `width` characters each, wrapped between words."""
    columns = [
        [piece for line in visible(text).expandtabs().split("\n") for piece in textwrap.wrap(line, width) or [""]]
        for text in (left, right)
    ]
    lines = (f"{a.ljust(width)} │ {b}".rstrip() for a, b in zip_longest(*columns, fillvalue=""))
    return "\n".join(lines)


def in_bytes(num_bytes: float) -> str:
    """Format a number of bytes in the largest binary unit with a value of at least one: 1.5 MiB."""
    units = ("B", "KiB", "MiB", "GiB")
    power = next((p for p in range(len(units)) if num_bytes < 1024 ** (p + 1)), len(units) - 1)
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {units[power]}"


def in_time(seconds: float, decimals: int = 0) -> str:
    """Format a duration: 12 s, 3 min 05 s, 2 h 05 min. `decimals`: of one below a minute, such as 12.3 s."""
    whole = round(seconds)
    if round(seconds, decimals) < 60:
        return f"{seconds:.{decimals}f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def in_short_time(seconds: float) -> str:
    """Format the duration of a step or a part of one: 0.12 ms, 12.3 ms, 345 ms, 1.23 s, 3 min 05 s."""
    ms = 1000 * seconds
    if round(ms) < 1000:
        return f"{ms:.{2 if ms < 9.995 else 1 if ms < 99.95 else 0}f} ms"
    return in_time(seconds, 2 if seconds < 9.995 else 1)


def stamped(text: str, when: float) -> str:
    """Return text with the time (UTC, seconds since 1970) before each of its lines."""
    time = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return "\n".join(f"{time}  {line}" for line in text.split("\n"))


def fitted(fields: Sequence[tuple[str, ...]], width: int) -> str:
    """Fit fields into one line. The most important field is first; each field has forms from long to short.

    If they do not fit, the last fields are shortened, and then omitted. The first field always stays.
    """
    from rich.cells import cell_len

    long, short = [forms[0] for forms in fields], [forms[-1] for forms in fields]
    some_short = (long[:i] + short[i:] for i in range(len(fields), -1, -1))
    some_left_out = (short[:i] for i in range(len(fields) - 1, 0, -1))
    lines = ["  ".join(shown) for shown in (*some_short, *some_left_out)]
    return next((line for line in lines if cell_len(line) <= width), lines[-1])


def cut(text: str, width: int) -> str:
    """Return text in at most `width` columns; East Asian characters take two."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"


def wrapped(text: str, width: int) -> str:
    """Wrap text to lines of at most `width` columns, between words, or after the commas of a word that is too long.

    Continuation lines are indented to the last column, like the value in `label       value`. A path that is longer
    than a line is not broken, so that it can be copied.
    """
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    from rich.cells import cell_len

    if cell_len(line) <= width:
        return line
    columns = [cell_len(line[: gap.end()]) for gap in re.finditer(r"\S {2,}(?=\S)", line)]
    columns = [column for column in columns if column <= width // 2]
    indent = " " * (columns[-1] if columns else len(line) - len(line.lstrip()) + 2)
    lines = [""]
    for word in re.findall(r"\s*\S+", line):
        for part in re.findall(r".+?,|.+", word) if len(indent) + cell_len(word) > width else [word]:
            is_new = len(lines[-1]) <= len(indent)  # another line would have no more room
            if is_new or cell_len(lines[-1]) + cell_len(part) <= width:
                lines[-1] += part
            else:
                lines.append(indent + part.lstrip())
    return "\n".join(lines)


def closest(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the allowed name that is most similar, or None if none is similar enough. `cutoff`: 1 is equal."""
    return next(iter(get_close_matches(name, list(allowed), n=1, cutoff=cutoff)), None)


def did_you_mean(*names: str) -> str:
    return f"Did you mean {either(names)}?"


def either(names: Iterable[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)
