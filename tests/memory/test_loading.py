"""Loading a base takes its own bytes and one matrix: anonymous memory, sampled from outside the process that loads."""

import json
from pathlib import Path

import pytest

from dualtune.engine.testing.tiny_models import write_tiny_llama

ROOT = Path(__file__).parents[2]
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip
TABLE = SHAPE["vocab_size"] * SHAPE["hidden_size"]
LINEAR = 5 * (512 * (512 + 256 + 256 + 512) + 3 * 512 * 1536)
LARGEST = 4 * TABLE
MARGIN = 8 << 20  # Python's own objects, and small blocks of the C library

# Bytes that stay: of a weight in a linear layer, and of one in the embedding, which is the head too.
STAYS = {
    ("torch", "none"): (0, 0),  # mapped from the file
    ("torch", "nf4"): (0.52, 0),
    ("torch", "int8"): (1.01, 0),
    ("torch", "affine8"): (1.125, 1.125),
    ("torch", "affine4"): (0.625, 0.625),
    ("mlx", "none"): (4, 4),
    ("mlx", "int8"): (1.01, 4),
    ("mlx", "affine8"): (1.125, 1.125),
    ("mlx", "affine4"): (0.625, 0.625),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "float32", **SHAPE)
    assert 60e6 < (path / "model.safetensors").stat().st_size < 80e6
    return path


@pytest.fixture(scope="module", params=["torch", "mlx"])
def loads(request, model_dir):
    """What each load of one backend has taken, by format. All are measured in one process, which saves time."""
    pytest.importorskip({"torch": "bitsandbytes", "mlx": "mlx.core"}[request.param])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import load_memory

        if not load_memory.has_status():
            pytest.skip("no /proc/PID/status here")
        cases = [(name, "float32") for backend, name in STAYS if backend == request.param]
        found = load_memory.measure(model_dir, request.param, cases)
        return {(request.param, name): load for (name, _), load in zip(cases, found, strict=True)}


def test_a_load_takes_what_stays_and_one_matrix(loads):
    for case, found in loads.items():
        (of_linear, of_table), text = STAYS[case], f"{case}: {json.dumps(found)}"
        final = of_linear * LINEAR + of_table * TABLE
        kept = LARGEST * (case[0] == "mlx")  # by the C library, of a matrix that was freed; torch returns it
        assert found["peak_anonymous_bytes"] <= found["final_anonymous_bytes"] + 1.5 * LARGEST + MARGIN, text
        assert final - MARGIN <= found["final_anonymous_bytes"] <= final + kept + MARGIN, text


def test_what_stays_mapped_is_what_is_not_packed(loads):
    """Pages of a file can be dropped, but count as memory of the process: those of packed matrices do not stay."""
    for (backend, name), found in loads.items():
        if backend == "torch":
            stays = {"none": LINEAR + TABLE, "nf4": TABLE, "int8": TABLE}.get(name, 0)
            assert found["final_mapped_bytes"] <= 4 * stays + MARGIN, name
            assert found["peak_mapped_bytes"] <= 4 * stays + LARGEST + MARGIN, name


def test_nf4_has_nested_statistics_and_takes_half_a_byte_of_a_weight(open_backend, tmp_path):
    """Loaded from a pretrained file, as it is trained on; a layer of 2,048 weights a row, which are common."""
    pytest.importorskip("bitsandbytes")
    from dualtune.engine.backend import LoadRequest
    from dualtune.model.adapter import AdapterSpec
    from dualtune.model.optimizer import OptimizerSpec

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
