"""Mixtures in MLX's quantization: torch packs the experts and rounds the routers as mlx-lm does."""

import numpy as np
import pytest

from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient
from dualtune.model.adapter import AdapterSpec, modules_of
from dualtune.model.optimizer import OptimizerSpec

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

import tiny_families

WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 64}
# Experts one by one in the files; the same with routers in 8 bits and a dense layer; narrow ones, which stay plain.
FAMILIES = {
    "mixtral": tiny_families.FAMILIES["mixtral"] | WIDE,
    "qwen3_moe": tiny_families.FAMILIES["qwen3_moe"] | WIDE,
    "qwen2_moe": tiny_families.FAMILIES["qwen2_moe"] | WIDE | {"moe_intermediate_size": 32},
    "olmoe": tiny_families.SIZES | WIDE | {"num_experts": 4, "num_experts_per_tok": 2},
}
SPEC = AdapterSpec(4, 6.0, 0.0, ("all-linear", "gate"), experts=True)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("mixtral", "affine4"), ("qwen3_moe", "affine8"),
        *(pytest.param(*case, marks=pytest.mark.long)
          for case in (("qwen2_moe", "affine8"), ("olmoe", "affine4"), ("qwen3_moe", "affine4"))),
    ],
)  # fmt: skip
def test_both_backends_compute_with_the_same_numbers(backends, tmp_path, family, quantization):
    model = tiny_families.write_family(family, tmp_path / "model", **FAMILIES[family])
    batch, engines = tiny_families.BATCH, []
    for name in ("torch", "mlx"):
        request = LoadRequest(model, "float32", quantization, "pretrained", SPEC, OptimizerSpec(), seed=5)
        engines.append(backends[name].load(request))
    modules = modules_of(engines[0].adapter_state())
    assert_equal(*({module: engine._frozen(module) for module in modules} for engine in engines))
    for engine in engines:
        tiny_families.trained(engine)
    assert_close(*(gradient(engine, batch) for engine in engines), tolerances.GRADIENT)
    a, b = (tiny_families.at_tokens(engine.logprobs(batch)) for engine in engines)
    assert np.abs(a - b).max() <= tolerances.LOGPROBS
    weights = [engine.description.adapted_weights for engine in engines]
    of_routers = 0 if quantization == "affine8" or family == "qwen3_moe" else 2  # which torch keeps unpacked
    assert weights[0]["four_bit"] == weights[1]["four_bit"] - of_routers
