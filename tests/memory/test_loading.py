"""Loading a base takes its own bytes and one matrix: anonymous memory, sampled from outside the process that loads."""

import json
from pathlib import Path

import pytest

from dualtune.testing.tiny_models import write_tiny_llama

ROOT = Path(__file__).parents[2]
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip
TABLE = SHAPE["vocab_size"] * SHAPE["hidden_size"]
LINEAR = 5 * (512 * (512 + 256 + 256 + 512) + 3 * 512 * 1536)
LARGEST = 4 * TABLE
MARGIN = 8 << 20  # Python's own objects, and small blocks of the C library

# Bytes that stay: of a weight in a linear layer, and of one in the embedding.
STAYS = {
    ("torch", "none"): (0, 0),  # mapped from the file
    ("torch", "nf4"): (0.52, 0),
    ("torch", "int8"): (1.01, 0),
    ("mlx", "int8"): (1.01, 4 + 4),  # with a transposed copy of the head, made after the load
    ("mlx", "affine4"): (0.625, 0.625),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "float32", **SHAPE)
    assert 60e6 < (path / "model.safetensors").stat().st_size < 80e6
    return path


@pytest.fixture
def measure(monkeypatch, model_dir):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import load_memory

    if not load_memory.has_status():
        pytest.skip("no /proc/PID/status here")
    return lambda backend, quantization: load_memory.measure(model_dir, backend, quantization, "float32")


@pytest.mark.parametrize(("backend", "quantization"), STAYS)
def test_a_load_takes_what_stays_and_one_matrix(measure, backend, quantization):
    pytest.importorskip({"torch": "bitsandbytes", "mlx": "mlx.core"}[backend])
    of_linear, of_table = STAYS[backend, quantization]
    final = of_linear * LINEAR + of_table * TABLE
    found = measure(backend, quantization)
    assert found["peak_anonymous_bytes"] <= final + 1.5 * LARGEST + MARGIN, json.dumps(found)
    assert final - MARGIN <= found["final_anonymous_bytes"] <= final + MARGIN + LARGEST * (backend == "mlx")


def test_nf4_has_nested_statistics_and_takes_half_a_byte_of_a_weight(open_backend, tmp_path):
    """Loaded from a pretrained file, as it is trained on; a layer of 2,048 weights a row, which are common."""
    pytest.importorskip("bitsandbytes")
    from dualtune.adapter.spec import AdapterSpec
    from dualtune.backend import LoadRequest
    from dualtune.optimizer import OptimizerSpec

    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 8}
    path = write_tiny_llama(tmp_path / "model", **wide, num_key_value_heads=8, head_dim=128)
    spec = AdapterSpec(2, 2.0, 0.0, ("all-linear",))
    engine = open_backend("torch").load(
        LoadRequest(path, "float32", "nf4", "pretrained", spec, OptimizerSpec(), seed=1, kernels="reference")
    )
    packed = [layer for layer in engine.model.modules() if type(layer).__name__ == "Linear4bit"]
    assert len(packed) == 7 and all(layer.weight.quant_state.nested for layer in packed)
    stored = engine.description.adapted_weights
    assert stored["four_bit"] == 7 and stored["bytes"] <= 0.517 * stored["parameters"]
