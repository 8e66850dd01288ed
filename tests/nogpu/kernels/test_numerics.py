"""Every Triton kernel in Triton's interpreter: products against float64, masks and unpacked weights to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: pip install 'dualtune[dev]' on Linux")

# Relative to the largest number. float16 rounds what is stored in it by 2^-11; sums stay in float32.
LIMITS = {"float32": 1e-6, "float16": 6e-4}
SUMS = ("dA", "dB", "wide v", "wide dB")


@pytest.fixture(scope="module")
def found():
    """What `interpreted.py` says: case -> name -> difference."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = [sys.executable, str(Path(__file__).with_name("interpreted.py"))]
    process = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("case", ["lora float32", "lora float16", "lora of one token", "lora of no token"])
def test_the_products_are_those_of_float64(case, found):
    assert found[case].keys() == {"u", "v", "dx", *SUMS}
    for name, gap in found[case].items():
        assert gap < (LIMITS["float32"] if name in SUMS or "float16" not in case else LIMITS["float16"]), name


def test_the_mask_is_the_core_s_to_the_bit(found):
    assert found["mask"] == {"u": 0, "dx": 0, "dA": 0}


@pytest.mark.parametrize("kind", ["nf4", "affine4", "affine8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_unpacked_to_the_bit(kind, dtype, found):
    assert found[f"{kind} {dtype}"] == {"bits": 0}


@pytest.mark.parametrize("quantization", ["nf4", "affine4"])
def test_a_whole_step_by_the_kernels_is_that_of_the_plain_code(quantization, found):
    """Loading tries each of them on the model and takes it; float16 rounds the gradients by less than this."""
    step = found[f"step {quantization}"]
    dequant = {"nf4": "nf4_dequant", "affine4": "affine_dequant"}[quantization]
    assert f", {dequant}, lora_down, lora_dx, lora_da, lora_back_g;" in step["kernels"]
    assert step["gradient"] < 4e-3
