"""Runs that are killed at random lose nothing: some trials of the suite in this folder. `make chaos` runs hundreds."""

import json
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "num_trials"), [("torch", 16), ("mlx", 6)])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(open_backend, python, tmp_path, backend, num_trials):
    open_backend(backend)  # or skip
    report = tmp_path / "chaos.json"
    done = python(Path(__file__).parent, f"--{backend}", num_trials, "--seed", 1, "--output", report)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(report.read_text())["backends"][backend]
    assert (row["trials"], row["lost"], row["corrupted"], row["not bitwise"]) == (num_trials, 0, 0, 0)
    least = num_trials / 2 if backend == "torch" else 1  # where processes cannot fork, most kills hit the imports
    assert row["resumed"] >= least, "killed too early to prove anything"
