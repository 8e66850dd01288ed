"""Every link of a page leads to a file that exists, and to a heading that it has; the navigation has every page."""

import tomllib
from pathlib import Path

import pytest
from pages import ROOT, anchors, links
from reference import PAGES as GENERATED

FOLDERS = ("docs", "examples", "benchmarks/results")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
FOREIGN = ("http:", "https:", "mailto:")


def problem_of(link: str, page: Path) -> str | None:
    """What is wrong with a link, if anything."""
    path, _, anchor = link.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return "no such file"
    if anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    inner = [link for link in links(page.read_text(encoding="utf-8")) if not link.startswith(FOREIGN)]
    assert [(link, problem) for link in inner if (problem := problem_of(link, page))] == []


def test_links_are_found_and_judged(tmp_path):
    text = "# A `b` [c](d.md) – e\n[x](y.md#z) `[no](no.md)` [![p](p.svg)](q.md)\n```sh\n[no](no)\n```\n# A\n# A\n"
    assert links(text) == ["d.md", "y.md#z", "p.svg", "q.md"]
    assert anchors(text) == {"a-b-c--e", "a", "a-1"}
    page = ROOT / "docs" / "data.md"
    wrong = ["no.md", "#no-such-heading", "hooks.md#no-such-heading", "../../outside.md"]
    assert None not in [problem_of(link, page) for link in wrong]
    assert [problem_of(link, page) for link in ("#what-is-trained", "hooks.md#order", "decisions")] == [None] * 3


def test_the_source_distribution_has_what_its_pages_link_to():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = {name.strip("/") for name in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    linked = [
        (page.parent / link.partition("#")[0]).resolve().relative_to(ROOT).parts
        for page in PAGES
        for link in links(page.read_text(encoding="utf-8"))
        if not link.startswith((*FOREIGN, "#"))
    ]
    assert {parts[0] for parts in linked if parts} - included == set()


def test_every_page_is_in_the_navigation_once():
    """The decisions are listed on their own page."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    named = list(_paths(config["nav"]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    decisions = {path for path in pages if path.startswith("decisions/") and path != "decisions/README.md"}
    others = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"} | {
        f"reference/{name}" for name in GENERATED
    }
    assert sorted(named) == sorted((pages - decisions) | others)


def _paths(items):
    for item in items:
        for value in item.values() if isinstance(item, dict) else [item]:
            yield from _paths(value) if isinstance(value, list) else [value]
