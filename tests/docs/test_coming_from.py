"""The pages for users of other trainers: what they show the import gives, and our defaults are those of the schema."""

import re
from pathlib import Path

import pytest
from pages import ROOT, blocks

from dualtune.config.importing.translate import import_config, to_text
from dualtune.config.schema import sections

PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
COUNTS = {7: "seven"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_our_defaults_are_those_of_the_schema(page):
    table = page.read_text(encoding="utf-8").partition("<!-- defaults -->")[2]
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| `(\w+)\.(\w+)` \| ([^|]+) \|$", table, re.M)
    assert len(rows) >= 8
    for section, key, said in rows:
        default = sections()[section].model_fields[key].default
        shown = (
            COUNTS[len(default)]
            if isinstance(default, tuple)
            else f"{default:g}"
            if type(default) is float
            else default
        )
        assert re.match(rf"{re.escape(str(shown).lower())}\b", said), (section, key, default)


def test_the_translated_config_is_what_the_import_gives(tmp_path, monkeypatch):
    page = ROOT / "docs" / "coming_from" / "axolotl.md"
    theirs, ours = (block.text for block in blocks(page) if block.language == "yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qlora.yml").write_text(theirs, encoding="utf-8")
    assert ours == to_text(import_config(Path("qlora.yml")))
