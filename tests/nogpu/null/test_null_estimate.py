"""The planner's estimate beside torch's allocator: three cases of the grid. The benchmark counts all of them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("null_gpu", reason="needs the null GPU: make test-null-gpu")
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import null_gpu_memory


@pytest.mark.parametrize("case", ["llama-19m bf16 2k", "SmolLM2-135M NF4 1k", "SmolLM2-135M bf16 2k, {layers: 15}"])
def test_the_estimate_is_within_two_percent(case):
    found = null_gpu_memory.in_its_own_process(case, null_gpu_memory.ROOT)
    assert found["estimated_bytes"] == pytest.approx(found["peak_bytes"] - found["workspaces_bytes"], rel=0.02)
    assert (found["copies"], found["waits"]) == (1, 0)
