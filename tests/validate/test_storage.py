"""What backends say of the weights under an adapter, counted here from the shapes and the formats alone."""

import pytest

from dualtune.doctor.validate.tiers import DEMO_MODEL
from dualtune.engine.backend import LoadRequest
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

LAYERS = [(128, 128), (64, 128)] * 3  # q_proj and v_proj of dualtune's own model
WEIGHTS = [out * in_ for out, in_ in LAYERS]


def nf4(count: int) -> int:
    """QLoRA (arXiv 2305.14314): 4 bits; a byte of scale per 64; a float32 per 256 scales; their mean; two tables."""
    scales = count // 64
    return count // 2 + scales + 4 * -(-scales // 256) + 4 + 4 * (16 + 256)


def affine4(count: int) -> int:
    """4 bits, and per group of 64 a scale and a bias in float32, in which MLX computes on a CPU."""
    return count // 2 + 2 * 4 * (count // 64)


@pytest.mark.parametrize(
    ("name", "quantization", "num_bytes"),
    [("torch", "nf4", nf4), ("torch", "none", lambda count: 4 * count), ("mlx", "affine4", affine4),
     ("mlx", "affine8", lambda count: affine4(count) + count // 2), ("mlx", "none", lambda count: 4 * count)],
)  # fmt: skip
def test_the_weights_under_an_adapter_take_what_their_format_takes(open_backend, name, quantization, num_bytes):
    spec = AdapterSpec(8, 16, 0.0, ("q_proj", "v_proj"))
    request = LoadRequest(DEMO_MODEL, "auto", quantization, "pretrained", spec, OptimizerSpec(), 1)
    assert open_backend(name).load(request).description.adapted_weights == {
        "layers": len(LAYERS),
        "four_bit": len(LAYERS) if quantization in ("nf4", "affine4") else 0,
        "parameters": sum(WEIGHTS),
        "bytes": sum(map(num_bytes, WEIGHTS)),
    }
