"""Regenerate the tables of docs/coming_from/ from the rules of `dualtune config import`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dualtune.config.importing.table import Rule
from dualtune.config.importing.translate import TRAINERS

MOST_NAMES = 8  # of a row
PAGES = Path(__file__).parents[1] / "docs" / "coming_from"

_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)


def with_tables(page: str) -> str:
    """Return the page with each table between its marks regenerated."""
    return _TABLE.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", page)


def _table(name: str) -> str:
    rows = (_row(rule) for rule in sorted(TRAINERS[name].RULES, key=_is_lost) if _is_shown(rule))
    return "\n".join([f"| {name} | dualtune | |", "|---|---|---|", *_lines(rows)])


def _is_shown(rule: Rule) -> bool:
    """Whether a page names the rule: `dualtune config import` reports the others, with their reason."""
    return bool(rule.convert or (rule.keys and not rule.is_needless))


def _is_lost(rule: Rule) -> bool:
    return not rule.convert


def _row(rule: Rule) -> tuple[str, str, str]:
    word = "not translated: " if _is_lost(rule) else ""
    more = ", …" if len(rule.names) > MOST_NAMES else ""
    return _in_code(", ".join(rule.names[:MOST_NAMES])) + more, _in_code(rule.keys), word + rule.note


def _lines(rows: Iterable[tuple[str, str, str]]) -> Iterable[str]:
    escaped = ((cell.replace("|", "\\|") for cell in row) for row in rows)
    return (f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in escaped)


def _in_code(names: str) -> str:
    """Format each of the names as code."""
    return f"`{names}`".replace(", ", "`, `").replace(" or ", "` or `") if names else ""


if __name__ == "__main__":
    for page in PAGES.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
