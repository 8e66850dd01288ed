"""Merged weights are written one after another: the same file as the library's, in the memory of one matrix."""

import pytest
from safetensors.torch import load_file, save

from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.testing.tiny_models import write_tiny_gpt2, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 128,
}  # fmt: skip
LARGEST = 256 * 512
LORA = AdapterSpec(rank=4, alpha=8.0, dropout=0.0, targets=("all-linear",))
FULL = AdapterSpec(rank=1, alpha=1.0, dropout=0.0, targets=(), method="full")


@pytest.fixture
def engine_of(open_backend):
    def load(name, directory, spec=LORA, dtype="float32", **options):
        request = LoadRequest(directory, dtype, "auto", "pretrained", spec, OptimizerSpec(), seed=0, **options)
        engine = open_backend(name).load(request)
        if spec is LORA:  # else B, and with it the update, is zero
            engine.load_adapter_state({n: w + 0.01 for n, w in engine.adapter_state().items()})
        return engine

    return load


def expected(engine, directory):
    """Return the bytes of the file, by the definition: W + scale · B A in float32, rounded to the precision of W."""
    if not engine._layers:
        prefix = "transformer." * (engine.model.config.model_type == "gpt2")
        return save({n.removeprefix(prefix): w for n, w in engine._adapter.masters.items()}, {"format": "pt"})
    precision = engine.model.dtype
    weights = {name: weight.to(precision) for name, weight in load_file(directory / "model.safetensors").items()}
    for module, layer in engine._layers.items():
        name = f"{module.removeprefix('transformer.')}.weight"
        delta = layer.scale * (layer.lora_B.detach() @ layer.lora_A.detach())
        delta = delta.T if type(layer.base).__name__ == "Conv1D" else delta
        weights[name] = (weights[name].float() + delta).to(precision).contiguous()
    return save(weights, {"format": "pt"})


@pytest.mark.parametrize(
    ("write", "changes", "spec", "options"),
    [
        (write_tiny_llama, {}, LORA, {"resident_layers": 1, "checkpointing": ActivationCheckpointing("all")}),
        (write_tiny_gpt2, {}, LORA, {}),
        (write_tiny_llama, {}, FULL, {"dtype": "bfloat16"}),
        (write_tiny_gpt2, {}, FULL, {}),
    ],
    ids=["streamed", "gpt2", "full", "full gpt2"],
)
def test_the_file_is_the_one_that_the_library_writes(write, changes, spec, options, engine_of, tmp_path):
    directory = write(tmp_path / "model", **changes)
    engine = engine_of("torch", directory, spec, **options)
    engine.save_merged(tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == expected(engine, directory)


def test_torch_takes_the_memory_of_one_matrix(engine_of, open_backend, tmp_path):
    """In float32 and, on a CPU, once more to add it: a GPU casts number by number."""
    from dualtune_torch.profile import bytes_held

    engine = engine_of("torch", write_tiny_llama(tmp_path / "model", **WIDE), dtype="bfloat16")
    before = bytes_held()
    found = open_backend("torch").profile(lambda: engine.save_merged(tmp_path / "merged"), tmp_path)
    assert found.peak_bytes - before <= 8.5 * LARGEST


def test_mlx_takes_the_memory_of_few_matrices(engine_of, open_backend, tmp_path):
    """What it adds up, in float32; all matrices together would be 60 bytes times the largest one."""
    engine = engine_of("mlx", write_tiny_llama(tmp_path / "model", **WIDE), dtype="bfloat16")
    backend = open_backend("mlx")
    mx.eval(engine.model.parameters())
    mx.clear_cache()
    backend.reset_peak_memory()
    before = backend.memory().used_bytes
    engine.save_merged(tmp_path / "merged")
    assert backend.memory().peak_bytes - before <= 4 * 4 * LARGEST
