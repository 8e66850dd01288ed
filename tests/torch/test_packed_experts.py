"""Stacked experts in NF4 on torch: each matrix packed on its own, unpacked where its rows are."""

import numpy as np
import pytest

from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

import tiny_families  # noqa: E402

SIZES = tiny_families.SIZES | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
EXPERTS = tiny_families.EXPERTS | {"moe_intermediate_size": 64}
# Files with experts one by one, which are read by layers; stacks of gate and up by turns, transposed, with a bias; and
# a family that transformers' own loader has to read.
FAMILIES = {
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]},
    "gpt_oss": SIZES | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": SIZES | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
}  # fmt: skip
SPEC = AdapterSpec(4, 6.0, 0.0, ("all-linear",), experts=True)
LENGTHS = [9, 16, 5, 12]
BATCH = random_batch(LENGTHS, 96)


def load(directory, quantization, spec=SPEC, weights="pretrained"):
    request = LoadRequest(directory, "float32", quantization, weights, spec, OptimizerSpec(), seed=5)
    return get_backend("torch").load(request)


def test_experts_are_read_layer_by_layer(tmp_path, monkeypatch):
    """From files that hold them one by one, without transformers' loader, which would hold the plain model."""
    import dualtune_torch.model

    monkeypatch.delattr(dualtune_torch.model, "_pretrained")
    model = tiny_families.write_family("qwen3_moe", tmp_path / "model", **FAMILIES["qwen3_moe"])
    weights = load(model, "nf4").description.adapted_weights
    assert weights["four_bit"] == weights["layers"] == 2 * 4 + 3 + 4 * 3


def dequantized(packed, source, out):
    """Write a model with the numbers of a packed one."""
    from dualtune_torch.experts import AdaptedExperts
    from dualtune_torch.weights.frozen import weight_of
    from dualtune_torch.weights.nf4 import is_nf4

    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for path, module in packed.named_modules():
            if isinstance(module, AdaptedExperts):
                experts = plain.get_submodule(path)
                for name in ("gate_up_proj", "down_proj"):
                    stack, weight = getattr(module.base, name), getattr(experts, name)
                    for number in range(len(weight)):
                        matrix = stack.matrix(number, torch.float32)
                        weight[number].copy_(matrix.T if experts.is_transposed else matrix)
            elif is_nf4(module) and ".experts." not in path:
                plain.get_submodule(path).weight.copy_(weight_of(module, torch.float32))
    plain.save_pretrained(out)
    return out


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(n, marks=pytest.mark.long) for n in ("gpt_oss", "glm4_moe"))]
)
def test_packed_experts_compute_as_plain_ones_with_their_numbers(tmp_path, family):
    model = tiny_families.write_family(family, tmp_path / "model", **FAMILIES[family])
    bare = load(model, "nf4", AdapterSpec(4, 6.0, 0.0, ()))
    twin = dequantized(bare.model, model, tmp_path / "twin")
    engines = [load(model, "nf4"), load(twin, "none")]
    assert engines[0].description.num_parameters == engines[1].description.num_parameters
    for engine in engines:
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
    assert_close(*(gradient(engine, BATCH) for engine in engines), tolerances.GRADIENT)
    a, b = (engine.logprobs(BATCH) for engine in engines)
    assert max(np.abs(a[row, :n] - b[row, :n]).max() for row, n in enumerate(LENGTHS)) <= tolerances.LOGPROBS
    # Frozen experts are packed as well.
    other = load(twin, "none", AdapterSpec(4, 6.0, 0.0, ()))
    a, b = (engine.logprobs(BATCH) for engine in (bare, other))
    assert max(np.abs(a[row, :n] - b[row, :n]).max() for row, n in enumerate(LENGTHS)) <= tolerances.LOGPROBS


@pytest.mark.long
def test_the_stored_bytes_are_those_of_the_plan(tmp_path):
    """Also of a model with random weights, of which there is no file."""
    from dualtune.engine.memory.counted import shape_from
    from dualtune.model.config_file import read_config
    from dualtune_torch.card.memory import nf4_bytes

    model = tiny_families.write_family("qwen3_moe", tmp_path / "model", **FAMILIES["qwen3_moe"])
    shape = shape_from(read_config(model), "torch")
    mixture = shape.by_layer[1]
    assert {(m.out, m.in_): m.number for m in mixture.matrices}[128, 64] == 4  # gate and up of four experts
    engine = load(model, "nf4", AdapterSpec(4, 6.0, 0.0, ("experts.gate_proj", "experts.up_proj", "experts.down_proj")))
    weights = engine.description.adapted_weights
    assert weights["four_bit"] == weights["layers"] == 12
    assert weights["bytes"] == 4 * (nf4_bytes(128 * 64) + nf4_bytes(64 * 64))
    assert load(model, "nf4", weights="random").description.adapted_weights["four_bit"] == 7 + 4 + 12
