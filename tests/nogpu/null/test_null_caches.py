"""The caches of compiled code, cold and warm: the first process fills them, the second one adds nothing."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("null_gpu", reason="needs the null GPU: make test-null-gpu")

PROGRAM = """
from null_engines import SMOLLM, batch, load, shape, step
engine = load(shape(SMOLLM, layers=2), kernels="fused", quantization="affine4")
step(engine, batch(512))
print(engine.description.kernels)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    said, files = [], []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | caches, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]
        said.append(run.stdout)
        files.append({path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.suffix in (".cubin", ".py")})
    assert said[0] == said[1] and "affine_dequant" in said[0]
    assert len(files[0]) > 10 and files[1] == files[0]
