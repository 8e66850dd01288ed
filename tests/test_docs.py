"""The documentation points at things that exist, and its examples are valid."""

import re
from pathlib import Path

import pytest

from dualtune.config import load_config, parse_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_code_marks_exist(page):
    """`tests/…`, `dualtune/…`, `docs/…` and so on, as a reader would look them up."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`(?:pytest )?((?:tests|dualtune|docs|configs|examples|scripts|backends)/[\w/.]+)`", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_config_in_the_readme_is_valid():
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert parse_config(text).train.epochs == 1


def test_the_readme_is_read_in_one_go():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    assert load_config(path).model.name
