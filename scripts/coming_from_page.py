"""Regenerate the tables of docs/coming_from/ from the rules of `dualtune config import`."""

from pathlib import Path

from dualtune.config.importing.translate import with_tables

PAGES = Path(__file__).parents[1] / "docs" / "coming_from"

if __name__ == "__main__":
    for page in PAGES.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
