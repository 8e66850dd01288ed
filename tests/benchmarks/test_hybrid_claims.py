"""The page about the documents' claims: its figures are those of the result, and its bounds are right."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "hybrid_claims.md"
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "digits.json").read_text(encoding="utf-8"))
BOUNDS = [(0.33, 2.11, 1.21), (0.5, 3.11, 1.51), (1.0, 2.11, 2.11), (0.0, 3.0, 1.0)]  # share, cost, at most


@pytest.fixture
def script(monkeypatch):
    """Import a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_tables_are_those_of_the_result(script):
    page = PAGE.read_text(encoding="utf-8")
    assert script("page_tables").filled(page, script("hybrid_claims").tables(RECORDED)) == page
    assert not RECORDED["commit"].endswith("-dirty")


def test_a_result_is_restored_as_it_was_recorded(script):
    found = script("hybrid_claims").restored(RECORDED).as_json()
    assert json.loads(json.dumps(found["rows"])) == RECORDED["rows"]


def test_the_tuned_rate_is_the_best_that_was_tried(script):
    tried = {float(rate): loss for rate, loss in RECORDED["tried_rates"].items()}
    best = min(tried, key=lambda rate: tried[rate])
    compare = importlib.import_module("dualtune.doctor.bench.digits")
    assert best == compare.CASES["tuned"] and min(tried) < best < max(tried)
    assert {row["case"]: row["learning_rate"] for row in RECORDED["rows"]} == dict(compare.CASES)


def test_the_figures_of_the_documents_are_marked_as_mocked():
    page = PAGE.read_text(encoding="utf-8")
    for said in ("97.45 %", "99.05 %", "99.37 %", "195.3 MB", "161.8 MB", "189.1 MB"):
        assert f"{said} (mocked)" in page
    for measured in ("810.4 s", "599.0 s", "431.5 s", "1.35×", "1.88×", "32.8 %", "42.8 %"):
        assert measured in page


@pytest.mark.parametrize(
    ("share", "cost", "most"), [(0.33, 2.11, 1.21), (0.5, 3.11, 1.51), (1.0, 2.11, 2.11), (0, 3, 1)]
)
def test_a_bound_is_the_cost_of_a_run_counted_step_by_step(script, share, cost, most):
    steps = 10_000
    counted = sum(1 if step < share * steps else cost for step in range(steps))
    assert script("hybrid_claims").bound(share, cost) == pytest.approx(steps * cost / counted, rel=1e-3)
    assert round(steps * cost / counted, 2) == most
