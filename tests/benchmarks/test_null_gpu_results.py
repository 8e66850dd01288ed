"""What was counted on the null GPU keeps what null_gpu.md says of it."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "null_gpu_memory.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "benchmarks" / "results" / "null_gpu.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("case", RESULTS)
def test_the_estimate_is_within_two_percent_and_nothing_waits(case):
    now = RESULTS[case]["now"]
    assert now["estimated_bytes"] == pytest.approx(now["peak_bytes"] - now["workspaces_bytes"], rel=0.02)
    assert (now["copies"], now["waits"]) == (1, 0)
    peak = (now["peak_bytes"] - now["workspaces_bytes"]) / 1e6
    (line,) = (row for row in PAGE if row.startswith(f"| {case} | now |"))
    assert f"| {peak:,.0f} |" in line
