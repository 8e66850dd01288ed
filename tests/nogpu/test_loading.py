"""Loading a stored model onto a GPU makes no copy of a weight in host memory: it is copied from the mapped file."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).parent / "fake"
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, to build the stand-in for a GPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is read from /proc"),
]
FORMATS = ("none", "nf4", "int8", "affine4")


@pytest.fixture(scope="module")
def loads():
    pytest.importorskip("bitsandbytes")
    if shutil.which("g++") is None or not Path("/proc/self/maps").exists():
        pytest.skip("the stand-in for a GPU needs g++, and Linux to see what is mapped")
    done = subprocess.run([sys.executable, FAKE / "loading.py", *FORMATS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_weights_go_from_the_mapped_file_to_the_device(loads):
    for name in FORMATS:
        found = loads[name]
        assert found["model_on"] == ["cuda:0"] and found["made"] == [], name
        assert 0.97 * found["file_bytes"] <= found["mapped_bytes"] <= found["file_bytes"], name
