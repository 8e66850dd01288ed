"""The documentation names files and make targets that exist, and its configs are valid. tests/docs/ checks the rest."""

import re
from pathlib import Path

import pytest

from dualtune.config import load_config, parse_config

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "examples", "benchmarks/results")
PAGES = [
    *(page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md"),  # it tells what was
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
]


def named_in_pages(pattern: str) -> list[tuple[Path, str]]:
    """(page, name) for everything that the pattern finds in the documentation."""
    found = [(page, name) for page in PAGES for name in re.findall(pattern, page.read_text(encoding="utf-8"))]
    assert found
    return found


def test_files_named_in_code_marks_exist():
    """`tests/…`, `dualtune/…`, `docs/…` and so on, as a reader would look them up."""
    named = named_in_pages(
        r"`(?:pytest )?((?:tests|dualtune|docs|configs|examples|scripts|backends|benchmarks|[.]github)/[\w./]+)`"
    )
    missing = [f"{page.relative_to(ROOT)}: {name}" for page, name in named if not (ROOT / name).exists()]
    assert not missing


def test_make_targets_in_code_exist():
    targets = set(re.findall(r"^([\w./-]+):(?: |$)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {name for _, name in named_in_pages(r"(?m)(?:^|`)make ([a-z.][\w./-]*)")} <= targets


def test_the_config_in_the_readme_is_valid():
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert parse_config(text).train.epochs == 1


def test_the_readme_is_read_in_one_go():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def test_the_index_links_every_page():
    """Decisions and the pages for users of other trainers have an index of their own; SETUP pages point elsewhere."""
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"contents.md", "SETUP_M4.md", "SETUP_H100.md"}
    text = (ROOT / "docs" / "contents.md").read_text(encoding="utf-8")
    assert pages <= set(re.findall(r"\]\(([\w.]+)\)", text))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    assert load_config(path).model.name
