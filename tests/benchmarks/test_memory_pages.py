"""The tables of pages are what their scripts compute today, or have recorded. To update a page, run its script."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def script(monkeypatch):
    """Import a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_what_fits_on_a_card_of_16_gb_is_what_the_planner_says(script):
    rows = [*script("rtx_5080").fits()]
    page = (RESULTS / "rtx_5080.md").read_text(encoding="utf-8")
    assert script("page_tables").filled(page, script("rtx_5080").tables(rows)) == page
    cases = {(row["model"].split("/")[1], row["base"]): row for row in rows}
    assert cases["Qwen3-4B", "nf4"]["fits"] and not cases["Qwen3-14B", "none"]["fits"]
    assert all(row["fits"] == (row["needs_bytes"] <= row["available_bytes"] < 16 * 2**30) for row in rows)


def test_the_memory_guide_says_what_the_planner_says(script):
    module = script("memory_guide")
    found = module.figures()
    page = module.PAGE.read_text(encoding="utf-8")
    assert script("page_tables").filled(page, module.tables(found)) == page
    recorded = json.loads((RESULTS / "memory_guide.json").read_text(encoding="utf-8"))
    assert {key: recorded[key] for key in found} == found
    total = [sum(row["parts"].values()) for row in found["techniques"]]
    assert total == sorted(total, reverse=True)  # each technique saves something


def test_the_figures_beside_the_documents_are_ours(script):
    module = script("validation_results")
    found = module.figures()
    page = (RESULTS / "validation_results.md").read_text(encoding="utf-8")
    assert script("page_tables").filled(page, module.tables(found)) == page


def test_the_peers_end_where_dualtune_ends(script):
    """What the page of quality says of them: three seeds, the same held-out loss within a thousandth."""
    runs = script("record").runs("quality")
    for peer in ("trl", "hf_peft"):
        gaps = [
            abs(runs[f"wikisql/{peer}/{seed}"]["loss"] / runs[f"wikisql/lora/{seed}"]["loss"] - 1) for seed in (1, 2, 3)
        ]
        assert max(gaps) < 1e-3, peer


def test_the_cost_of_experts_follows_the_active_ones(script):
    """Each one more costs the same, within a tenth; the page has the figures."""
    page, more = (ROOT / "docs/adapters.md").read_text(encoding="utf-8"), []
    for run in (script("record").runs("experts")[backend]["over_1_of_32"] for backend in ("torch", "mlx")):
        one, two, four, eight, _, of_many = (median for _, median, _ in run.values())
        assert (eight - one) / 7 == pytest.approx((four - two) / 2, rel=0.1) == pytest.approx(two - one, rel=0.1)
        assert f"{two:.2f}, {four:.2f} and {eight:.2f} times" in page
        more.append(f"{of_many / eight:.2f}")
    assert f"{' and '.join(more)} times that with 8 of 128" in page


def test_predicted_times_are_what_the_formulas_say_today(script):
    module = script("predict")
    found = json.loads((RESULTS / "predict.json").read_text(encoding="utf-8"))
    page = (RESULTS / "predict.md").read_text(encoding="utf-8")
    tables = {"validated": module.validated(found), "machines": module.machines()}
    assert script("page_tables").filled(page, tables) == page
    assert len(found["cases"]) >= 5 and all(abs(case["ratio"] - 1) <= 0.2 for case in found["cases"].values())


# By page: its tables, computed from the recorded result. Those that are computed anew have a test of their own.
RECORDED = {
    "docs/adapters.md": lambda script: {"merge_for": script("merge_for").table(script("record").runs("merge_for"))},
    "docs/data.md": lambda script: script("packing").tables(recorded("packing")),
    "docs/hybrid.md": lambda script: script("policy_cost").tables(recorded("policy_cost")),
    "docs/objectives.md": lambda script: {
        "preference": script("preference").table(script("record").runs("preference"))
    },
    "docs/quality.md": lambda script: script("quality").tables(script("record").runs("quality")),
    "docs/tinker.md": lambda script: {"training_host": script("training_host").table(recorded("training_host"))},
    "benchmarks/results/activation_cache.md": lambda script: {
        "measured": script("activation_cache").table(recorded("activation_cache"))
    },
    "benchmarks/results/averaging.md": lambda script: {"arms": script("averaging").table(recorded("averaging"))},
    "benchmarks/results/hybrid.md": lambda script: script("hybrid").recorded_tables(),
    "benchmarks/results/performance.md": lambda script: {"methods": script("launches").table(recorded("launches"))},
}
COMPUTED = {
    "docs/MEMORY_OPTIMIZATION_GUIDE.md", "benchmarks/results/predict.md", "benchmarks/results/rtx_5080.md",
    "benchmarks/results/validation_results.md", "benchmarks/results/hybrid_claims.md",
}  # fmt: skip


def recorded(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", RECORDED)
def test_a_table_is_that_of_the_recorded_result(script, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert script("page_tables").filled(text, RECORDED[page](script)) == text


def test_no_page_with_a_table_is_left_out():
    pages = [*(ROOT / "docs").rglob("*.md"), *RESULTS.glob("*.md"), *ROOT.glob("*.md")]
    marked = {
        page.relative_to(ROOT).as_posix()
        for page in pages
        if re.search(r"<!-- table \w+ -->", page.read_text(encoding="utf-8"))
    }
    assert marked == RECORDED.keys() | COMPUTED


def test_gpt2_has_the_published_number_of_parameters(script):
    """OpenAI's gpt2, gpt2-medium, gpt2-large and gpt2-xl on the hub, and the shape of 40 layers."""
    module = script("validation_results")
    counts = {name: module.gpt2(name).num_parameters for name in module.SIZES}
    published = {"small": 124_439_808, "medium": 354_823_168, "768M": 774_030_080, "XL": 1_557_611_200}
    assert {name: counts[name] for name in published} == published
    assert round(counts["1B of 40 layers"] / 1e6, 1) == 1024.5


def test_a_page_without_the_place_of_a_table_is_refused(script):
    with pytest.raises(ValueError, match="the page has places for a; the tables are a, b"):
        script("page_tables").filled("<!-- table a -->\nold\n<!-- end -->\n", {"a": "new", "b": "lost"})
    page = script("page_tables").filled("<!-- table a -->\nold\n<!-- end -->\n", {"a": "new"})
    assert page == "<!-- table a -->\n\nnew\n\n<!-- end -->\n"
