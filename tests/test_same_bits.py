"""scripts/same_bits.py: what it finds the same, and that a single changed constant does not escape it."""

import json
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "same_bits.py"


@pytest.fixture(scope="module")
def same_bits():
    spec = spec_from_file_location("same_bits", SCRIPT)
    module = module_from_spec(spec)
    sys.modules["same_bits"] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    yield module
    del sys.modules["same_bits"]


@pytest.fixture
def mutant(tmp_path):
    """This tree with another multiplier in the hash that decides what dropout keeps."""
    tree = tmp_path / "mutant"
    for name in ("dualtune", "backends"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    [path] = [path for path in tree.rglob("*.py") if "= 0x85EBCA6B" in path.read_text(encoding="utf-8")]
    path.write_text(path.read_text(encoding="utf-8").replace("= 0x85EBCA6B", "= 0x85EBCA6D"), encoding="utf-8")
    return tree


def test_a_changed_constant_is_found_where_it_matters_and_nowhere_else(python, mutant):
    result = python(SCRIPT, ROOT, mutant, "--only", "numpy-padded", "--only", "numpy-rollback", timeout=18000)
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["numpy-padded", "same"], result.stdout + result.stderr  # it has no dropout
    assert lines[1].split() == ["numpy-rollback", "DIFFERS"]
    assert "adapter/adapter_model.safetensors: different bytes" in result.stdout
    assert "metrics: " in result.stdout
    assert "1 the same, 1 different" in lines[-1]
    assert result.returncode == 1


@pytest.fixture
def write_run(tmp_path):
    """A run directory with one tensor in the adapter and in the optimizer, and one row of metrics."""

    def write(name: str, *, weight=1.0, moment=2.0, optimizer="optimizer_m", **row) -> Path:
        run = tmp_path / name
        (run / "adapter").mkdir(parents=True)
        checkpoint = run / "checkpoints" / "step-00000001"
        checkpoint.mkdir(parents=True)
        save_file({"w": np.float32([weight])}, run / "adapter" / "adapter_model.safetensors")
        (run / "adapter" / "adapter_config.json").write_text('{"r": 4}')
        save_file({"w": np.float32([weight])}, checkpoint / "adapter.safetensors")
        save_file({"w": np.float32([moment])}, checkpoint / f"{optimizer}.safetensors")
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5, "skipped": False} | row) + "\n")
        return run

    return write


@pytest.mark.parametrize("other", [{}, {"step_s": 3.0, "peak_bytes": 7}, {"optimizer": "slot_m"}], ids=str)
def test_time_memory_and_names_of_files_are_no_difference(same_bits, write_run, other):
    assert list(same_bits.differences(write_run("old"), write_run("new", **other))) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"weight": 1.0 + 2**-23}, "adapter/adapter_model.safetensors: different bytes"),
        ({"moment": -2.0}, "step-00000001: 1 of 2 tensors differ, such as optimizer_m.safetensors/w"),
        ({"moment": -2.0, "optimizer": "slot_m"}, "step-00000001: different tensors under different names"),
        ({"loss": 0.5 + 2**-53}, "metrics: 1 rows differ, first at step 1: loss 0.5 and 0.5000000000000001"),
        ({"loss": float("nan")}, "metrics: 1 rows differ, first at step 1: loss 0.5 and nan"),
        ({"new_number": 1}, "metrics: 1 rows differ, first at step 1: new_number None and 1"),
    ],
    ids=str,
)
def test_a_single_bit_is_a_difference(same_bits, write_run, other, said):
    assert said in list(same_bits.differences(write_run("old"), write_run("new", **other)))


def test_a_run_that_wrote_nothing_is_no_match(same_bits, write_run):
    runs = [write_run(name) for name in ("old", "new")]
    for run in runs:
        shutil.rmtree(run / "checkpoints")
        (run / "adapter" / "adapter_model.safetensors").unlink()
        (run / "metrics.jsonl").write_text("")
    found = list(same_bits.differences(*runs))
    assert "adapter: no safetensors file" in found
    assert "checkpoints: [] and []" in found
    assert "metrics: no losses" in found
