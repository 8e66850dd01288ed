"""Files to rows. A row remembers the file and line it came from, so that every later complaint can name it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from dualtune.errors import DataError

SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class RawRow:
    where: str  # "path:line"
    fields: dict[str, Any]


def read_rows(path: str | Path) -> list[RawRow]:
    """The rows of a .jsonl file: one JSON object a line; empty lines are skipped.

    DataError if the file is missing, empty or of another kind, or with every malformed line as `path:line: reason`.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: {'is a directory' if path.is_dir() else 'no such file'}; a .jsonl file is needed")
    if path.suffix not in (".jsonl", ".ndjson"):
        raise DataError(f"{path}: got a '{path.suffix or 'suffixless'}' file, allowed: .jsonl (one JSON object a line)")
    rows: list[RawRow] = []
    problems: list[str] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"{where}: not JSON: {error.msg} at column {error.colno}: {_excerpt(line, error.pos)}")
            continue
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
            problems.append(f"{where}: not usable JSON: {error}")
            continue
        if isinstance(fields, dict):
            rows.append(RawRow(where, cast(dict[str, Any], fields)))
        else:
            problems.append(f"{where}: got a JSON {type(fields).__name__}, a JSON object is needed")
    if problems:
        raise_problems(problems, len(rows) + len(problems))
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows


def raise_problems(problems: list[str], num_rows: int) -> NoReturn:
    """Raise a DataError that shows the first problems and counts the rest."""
    shown = "\n".join(problems[:SHOWN_PROBLEMS])
    more = f"\n… and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
    raise DataError(f"{shown}{more}\n{len(problems)} of {num_rows} rows cannot be used. Mend or remove them.")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start}); convert it, for example with iconv") from error


def _excerpt(line: str, position: int) -> str:
    return repr(line[max(0, position - 20) : position + 20])
