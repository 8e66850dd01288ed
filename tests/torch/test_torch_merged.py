"""A merged model is written tensor by tensor: the bytes of the library's writer, and one matrix at a time."""

import weakref

import pytest

from dualtune.adapter.spec import AdapterSpec
from dualtune.backend import LoadRequest
from dualtune.optimizer import OptimizerSpec
from dualtune.testing.conformance import random_adapter
from dualtune.testing.tiny_models import write_tiny_gpt2, write_tiny_llama

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from dualtune_torch.weights import merged  # noqa: E402

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("all-linear",))


@pytest.fixture
def load(open_backend, tmp_path):
    backend = open_backend("torch")

    def load_(write, dtype, **changes):
        path = write(tmp_path / "model", **changes)
        engine = backend.load(LoadRequest(path, dtype, "auto", "pretrained", SPEC, OptimizerSpec(), seed=4))
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_file_is_that_of_the_library(load, tmp_path, dtype, tied):
    engine = load(write_tiny_llama, dtype, tie_word_embeddings=tied)
    engine.model.register_buffer("wide", torch.ones(3, dtype=torch.float64))  # the widest dtype comes first
    engine.save_merged(tmp_path / "merged")
    tensors = merged.merged_tensors(engine.model, engine._layers)
    expected = {name: each.compute().contiguous().clone() for name, each in tensors.items()}
    assert ("lm_head.weight" in expected) is not tied
    save_file(expected, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    written = (tmp_path / "merged" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "expected.safetensors").read_bytes()


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_gpt2])
def test_one_matrix_is_computed_at_a_time(load, tmp_path, write, monkeypatch):
    engine, computed, compute = load(write, "float32"), [], merged.MergedTensor.compute

    def watched(self):
        assert all(each() is None for each in computed)
        found = compute(self)
        if self.layer is not None:
            computed.append(weakref.ref(found))
        return found

    monkeypatch.setattr(merged.MergedTensor, "compute", watched)
    engine.save_merged(tmp_path / "merged")
    assert len(computed) == len(engine._layers)
