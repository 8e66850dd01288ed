"""Every result is of a clean commit and cited, and every page says when and where its figures were measured."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.fixture
def origins(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import origins

    return origins


def test_a_result_is_of_a_clean_commit():
    """Anywhere in it, as in its parts."""
    dirty = re.compile(r'"[0-9a-f]+-dirty"')
    assert [path.stem for path in RESULTS if dirty.search(path.read_text(encoding="utf-8"))] == []


def test_the_pages_say_when_and_where_their_figures_were_measured(origins):
    """To write it anew: python benchmarks/origins.py"""
    stale = [page.name for page, text in origins.pages() if page.read_text(encoding="utf-8") != text]
    assert stale == []


def test_a_result_that_was_not_measured_again_says_why(origins):
    assert {path.stem for path in RESULTS if origins.is_older(path.stem)} == set(origins.WHY_OLDER)


def test_every_result_is_used():
    """By a page, or by a script or a test besides the script that writes it."""
    folders = ((ROOT, "*.md"), *((ROOT / name, "**/*.md") for name in ("docs", "benchmarks")))
    folders += tuple((ROOT / name, "**/*.py") for name in ("benchmarks", "scripts", "tests"))
    used = {
        path.stem for path in RESULTS if path.stem.startswith("tiers_")
    }  # all are read by scripts/gpu_tiers_page.py
    for path in (path for folder, pattern in folders for path in folder.glob(pattern)):
        text = path.read_text(encoding="utf-8").partition("<!-- measured -->")[0]
        used |= {name for name in re.findall(r"(\w+)\.json\b", text) if path.name != f"{name}.py"}
        used |= {path.stem} if path.suffix == ".md" else set()
    assert {path.stem for path in RESULTS} - used == set()


def written(day, commit, cpu="a CPU"):
    return {"date": day, "commit": commit, "machine": {"system": "a system", "cpu": cpu}}


@pytest.mark.parametrize(
    ("result", "line", "day"),
    [
        (written("2026-01-02", "a1"), "2026-01-02 at a1 on a CPU", ", 2026-01-02"),
        (written("2026-01-02", "a1", None), "2026-01-02 at a1 on a system", ", 2026-01-02"),
        # The parts of a result have their own; the result's own is that of the last writing.
        (written("2026-01-03", "c3") | {"x": written("2026-01-02", "b2"), "y": [written("2026-01-01", "a1")]},
         "2026-01-01 at a1, 2026-01-02 at b2 on a CPU", ", 2026-01-01 to 2026-01-02"),
        ({"launches": {"torch": 3}}, "counts, which have no day", ""),
    ],
)  # fmt: skip
def test_a_result_has_the_origin_of_its_parts(origins, monkeypatch, tmp_path, result, line, day):
    monkeypatch.setattr(origins, "RESULTS", tmp_path)
    monkeypatch.setattr(origins, "RECENT", "2026-01-01")
    (tmp_path / "speed.json").write_text(json.dumps(result))
    page = origins.with_origins("# Speed\n\nold\n\n<!-- measured -->\nold\n", "speed")
    assert page == f"# Speed\n\nold\n\n<!-- measured -->\n\nMeasured:\n\n- [speed.json](speed.json): {line}\n"
    assert origins.with_origins(page, "speed") == page and origins.with_origins("# Other\n", "other") == "# Other\n"
    cited = "see ([it](../benchmarks/results/speed.json)) and `benchmarks/results/speed.json`, 2020-01-01.\n"
    dated = f"see ([it](../benchmarks/results/speed.json){day}) and `benchmarks/results/speed.json`{day}.\n"
    assert origins.with_days(cited) == dated == origins.with_days(dated)
    assert origins.dated(tmp_path / "speed.md", page) == page and origins.dated(ROOT / "docs" / "a.md", cited) == dated


def test_a_page_says_why_a_result_was_not_measured_again(origins, monkeypatch, tmp_path):
    monkeypatch.setattr(origins, "RESULTS", tmp_path)
    monkeypatch.setattr(origins, "WHY_OLDER", {"speed": "it takes a day"})
    parts = {"x": written(origins.RECENT, "b2"), "y": written("2026-01-01", "a1")}
    (tmp_path / "speed.json").write_text(json.dumps(parts))
    assert origins.line_of("speed").endswith("at b2 on a CPU. Not all again: it takes a day")
    (tmp_path / "speed.json").write_text(json.dumps({"x": parts["x"]}))
    assert origins.line_of("speed").endswith("at b2 on a CPU")
