"""Generate the tables of docs/coming_from/ from the translation rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from dualtune.config.importing.others import OTHERS
from dualtune.config.importing.table import Rule
from dualtune.config.importing.translate import TRAINERS

_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)


def with_tables(page: str) -> str:
    """Return the page with each table between its marks regenerated."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2])}\n{found[3]}", page)


def _table(name: str) -> str:
    if name in OTHERS:
        rows = ((_in_code(theirs), _in_code(ours), note) for theirs, ours, note in OTHERS[name])
    else:
        rules = cast(tuple[Rule, ...], TRAINERS[name].RULES)
        rows = (_row(rule) for rule in sorted(rules, key=_kind))
    return "\n".join([f"| {name} | dualtune | |", "|---|---|---|", *_lines(rows)])


def _kind(rule: Rule) -> int:
    """Sort key: translated keys, then lost keys, then keys that are not needed."""
    return 0 if rule.convert else 2 if rule.is_needless else 1


def _row(rule: Rule) -> tuple[str, str, str]:
    word = ("", "not translated: ", "not needed: ")[_kind(rule)]
    return _in_code(", ".join(rule.names)), _in_code(rule.ours), word + rule.note


def _lines(rows: Iterable[tuple[str, str, str]]) -> Iterable[str]:
    escaped = ((cell.replace("|", "\\|") for cell in row) for row in rows)
    return (f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in escaped)


def _in_code(names: str) -> str:
    """Format each of the names as code."""
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else ""
