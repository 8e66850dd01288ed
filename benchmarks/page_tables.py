"""Tables that a script writes into a page: between `<!-- table NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from origins import RESULTS, dated

__all__ = ["RESULTS", "filled", "table", "write"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def filled(page: str, tables: Mapping[str, str]) -> str:
    """Return the text of a page with these tables. ValueError if it has no place for one, or a place for another."""
    found = re.findall(r"<!-- table (\w+) -->", page)
    if sorted(found) != sorted(tables):
        raise ValueError(f"the page has places for {', '.join(found)}; the tables are {', '.join(tables)}")
    for name, text in tables.items():
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page, flags=re.DOTALL)
    return page


def write(path: Path, tables: Mapping[str, str]) -> Path:
    """Write the tables into a page, and where its figures are from."""
    page = filled(path.read_text(encoding="utf-8"), tables)
    path.write_text(dated(path, page), encoding="utf-8")
    return path
