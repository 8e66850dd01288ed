"""Runs that are killed at random lose nothing: some trials of the suite in this folder. `make chaos` runs hundreds."""

import json
from pathlib import Path

import pytest


@pytest.mark.slow
# A kill by time hits another place on a busy machine; that at a fault point does not. So many trials begin with one
# behind the first checkpoint, whatever the machine does.
@pytest.mark.parametrize(
    ("backend", "num_trials", "seed", "least"),
    [("torch", 1, 1, 1), pytest.param("mlx", 1, 3, 1, marks=pytest.mark.long)],
)
def test_a_killed_run_resumes_as_if_nothing_had_happened(
    open_backend, python, tmp_path, backend, num_trials, seed, least
):
    open_backend(backend)  # or skip
    report = tmp_path / "chaos.json"
    done = python(Path(__file__).parent, f"--{backend}", num_trials, "--seed", seed, "--output", report, timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(report.read_text())["backends"][backend]
    assert (row["trials"], row["lost"], row["corrupted"], row["not bitwise"]) == (num_trials, 0, 0, 0)
    assert row["resumed"] >= least, "killed too early to prove anything"
