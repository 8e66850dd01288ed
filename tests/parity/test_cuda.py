"""A GPU against the CPU. Nothing here runs where torch sees no NVIDIA GPU."""

import json

import numpy as np
import pytest

from dualtune.base.errors import EnvironmentFault
from dualtune.engine.backend import get_backend
from dualtune.engine.testing import tolerances
from dualtune.show.run import run

pytestmark = pytest.mark.gpu


@pytest.fixture
def losses(stories, tmp_path):
    try:
        backends = {device: get_backend("torch", device) for device in ("cpu", "cuda")}
    except EnvironmentFault as error:
        pytest.skip(str(error))

    def losses_(device, **sections):
        sections["train"] = {"steps": 200} | sections.get("train", {})
        config = stories.config(tmp_path / f"{device}-{len(list(tmp_path.iterdir()))}", **sections)
        rows = (run(config, backends[device]).run_dir / "metrics.jsonl").read_text().splitlines()
        return np.array([json.loads(row)["loss"] for row in rows])

    return losses_


def test_cuda_follows_the_cpu_in_float32(losses):
    gap = np.abs(losses("cuda") - losses("cpu")).max()
    print(f"largest gap over 200 steps: {gap:.1e}")
    assert gap <= tolerances.STEP_LOSS


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "nf4"}])
def test_reduced_precision_learns_as_well(losses, changes):
    reduced, full = losses("cuda", model=changes), losses("cpu")
    assert abs(reduced[-20:].mean() - full[-20:].mean()) < 0.1
