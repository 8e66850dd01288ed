"""Regenerate the tables of docs/coming_from.md from the rules of `dualtune config import`."""

from pathlib import Path

from dualtune.config.importing.page import with_tables

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"

if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
