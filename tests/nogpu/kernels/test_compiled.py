"""The Triton kernels compiled for GPUs that are not here: no spills, no more registers or shared memory than recorded.

A part of the record; all of it is made anew by `python benchmarks/triton_kernels.py`.
"""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'dualtune[dev]' on Linux")

RECORD = json.loads((ROOT / "benchmarks/results/triton_kernels.json").read_text())
LARGE = "Mistral-7B q k v, r16, 8192 tokens"
CASES = [  # kernel, case, architecture: each once
    ("lora_down", f"{LARGE}, bfloat16", 100), ("lora_dx", f"{LARGE}, bfloat16", 80),
    ("lora_da", f"{LARGE}, bfloat16", 90), ("lora_back_g", f"{LARGE}, bfloat16", 120),
    ("nf4_dequant", "bfloat16", 89), ("affine_dequant", "4 bits, bfloat16", 86),
]  # fmt: skip


@pytest.fixture
def script(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return importlib.import_module("triton_kernels")


def test_the_record_has_every_case_on_every_architecture(script):
    cases = {f"{kernel}: {case}" for kernel, case in script.all_cases()}
    assert RECORD["cases"].keys() == cases
    for name, case in RECORD["cases"].items():
        assert case["compiled"].keys() == {f"sm_{number}" for number in script.ARCHITECTURES}
        for number in script.ARCHITECTURES:
            part = case["compiled"][f"sm_{number}"]
            assert part["stack_bytes"] == 0, name
            assert part["shared_bytes"] <= script.SHARED_KIB[number] * 1024, name
            assert (part["tensor_core_instructions"] > 0) == name.startswith("lora"), name


@pytest.mark.parametrize(("kernel", "case", "number"), CASES, ids=[f"{kernel} sm_{n}" for kernel, _, n in CASES])
def test_a_kernel_keeps_to_its_record(kernel, case, number, script):
    recorded = RECORD["cases"][f"{kernel}: {case}"]
    if RECORD["versions"]["triton"] != triton.__version__:
        pytest.skip(f"the record is of Triton {RECORD['versions']['triton']}, this is {triton.__version__}")
    found = script.compiled(kernel, case, (number,))
    assert found["grid"] == recorded["grid"]
    part, allowed = (each["compiled"][f"sm_{number}"] for each in (found, recorded))
    assert part["stack_bytes"] == 0
    assert part["registers"] <= allowed["registers"]
    assert part["shared_bytes"] <= allowed["shared_bytes"]
