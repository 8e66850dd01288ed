"""What torch.compile makes of dualtune's functions for a GPU that is not there: how many kernels each pass launches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="Triton is not installed: pip install 'dualtune[dev]' on Linux")

# Kinds of Inductor's kernels: poi one value at a time, per a row at a time, red in several passes over a row. Last, how
# many matrices are made: the results, and none for the loss, whose gradient is written over the logits.
KERNELS = {
    "norm": {"forward": ["per", 1], "backward": ["per", 1]},
    "gated": {"forward": ["poi", 1], "backward": ["poi", 2]},
    "rotated": {"forward": ["poi", 1]},
    "add_after_dropout": {"forward": ["poi", 1]},
    "loss_and_gradient_in_place": {"forward": ["red", "red", "poi", 0]},
}


@pytest.fixture(scope="module")
def found():
    """What `inductor_for_cuda.py` says."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = [sys.executable, str(Path(__file__).with_name("inductor_for_cuda.py"))]
    process = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_every_function_was_compiled(found):
    assert found.keys() == KERNELS.keys()


@pytest.mark.parametrize("name", KERNELS)
def test_a_function_is_so_many_kernels(name, found):
    assert found[name] == KERNELS[name]
