"""How many kernels MLX starts for a layer: the counts in benchmarks/results/launches.json, and reasons for changes."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def launches():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("launches_mlx")
    sys.path.remove(str(BENCHMARKS))


SHAPES = ["plain", "packed", "affine4", "dropout", "checkpointing", "attention in chunks"]


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_starts_as_many_kernels_as_recorded(name, launches):
    entry, found = launches.recorded()["mlx"][name], launches.count(launches.SHAPES[name])
    assert (found.primitives_per_layer, found.views_per_layer) == (
        entry["primitives_per_layer"], entry["views_per_layer"],
    ), "run benchmarks/launches_mlx.py, which asks for the reason"  # fmt: skip


def test_every_change_has_its_reason(launches):
    part = launches.recorded()["mlx"]
    assert [*part] == [*launches.SHAPES] == SHAPES
    for entry in part.values():
        assert entry["changes"][-1]["count"] == entry["primitives_per_layer"]
        assert all(change["date"] and change["reason"].strip() for change in entry["changes"])


def test_the_page_has_the_recorded_counts(launches):
    page = (BENCHMARKS / "results/performance.md").read_text()
    table = page.split("## Kernels on Metal, counted")[1].split("|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    shown = [[int(cell) for cell in row.split("|")[2:4]] for row in table]
    entries = [launches.recorded()["mlx"][name] for name in SHAPES]
    assert shown == [[entry["changes"][0]["count"], entry["primitives_per_layer"]] for entry in entries]


def test_a_changed_count_is_a_new_line(launches, tmp_path, monkeypatch):
    """What another backend has recorded stays."""
    monkeypatch.setattr(launches, "RESULT", tmp_path / "launches.json")
    monkeypatch.setattr(launches, "SHAPES", {"plain": None})
    (tmp_path / "launches.json").write_text('{"torch": {"plain": 1}}')
    for kernels, reason in ((3.0, "first"), (3.0, "nothing"), (2.0, "one less")):
        monkeypatch.setattr(launches, "count", lambda shape, kernels=kernels: launches.Count(kernels, 5.0))
        launches.refresh(reason)
    found = launches.recorded()
    assert found["torch"] == {"plain": 1} and found["mlx"]["plain"]["primitives_per_layer"] == 2.0
    changes = found["mlx"]["plain"]["changes"]
    assert [(c["count"], c["reason"]) for c in changes] == [(3.0, "first"), (2.0, "one less")]
