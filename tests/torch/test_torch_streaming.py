"""Layer streaming on torch: the same bits as with the whole base on the device, from slots and copies."""

from itertools import islice

import numpy as np
import pytest

from dualtune.activation_checkpointing import KEEP_ALL, ActivationCheckpointing
from dualtune.adapter.spec import AdapterSpec
from dualtune.backend import LoadRequest
from dualtune.errors import ConfigError
from dualtune.optimizer import OptimizerSpec
from dualtune.testing.conformance import random_adapter
from dualtune.testing.conformance_weights import weighted
from dualtune.testing.tiny_models import pack, random_batch, write_tiny_llama

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dualtune_torch.host import streaming as streaming_of_torch  # noqa: E402
from dualtune_torch.host.streaming import StreamedLayers  # noqa: E402
from dualtune_torch.host.transfers import Transfers  # noqa: E402
from dualtune_torch.weights.packed import PackedLayer  # noqa: E402

DOCUMENTS = random_batch([9, 16, 5, 12], 96)
PACKED = pack(weighted(DOCUMENTS, 1.0, 0.3, -0.5, 2.0), [[2, 0, 3], [1]])
FULL = ActivationCheckpointing("all")
NUM_LAYERS = 4
SHAPE = {"num_hidden_layers": NUM_LAYERS, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    write_tiny_llama(home / "Llama", **SHAPE)
    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / "GPT2")
    return home


@pytest.fixture
def load(models, open_backend):
    def load_(slots=None, family="Llama", *, dtype="float32", quantization="none", kernels="auto", how=FULL, **spec):
        pytest.importorskip("bitsandbytes" if quantization == "nf4" else "torch")
        spec = AdapterSpec(**{"rank": 4, "alpha": 6.0, "dropout": 0.1, "targets": ("all-linear",)} | spec)
        request = LoadRequest(
            models / family, dtype, quantization, "pretrained", spec, OptimizerSpec(), seed=4, kernels=kernels,
            checkpointing=how, resident_layers=slots,
        )  # fmt: skip
        engine = open_backend("torch").load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


def gradient(engine, *batches):
    """(gradient, loss) of micro-batches: one document per row, and packed with loss weights."""
    engine._adapter.flat.grad.zero_()
    engine._loss.zero_()
    for batch in batches or (DOCUMENTS, PACKED):
        engine.forward_backward(batch, divisor=30)
    return engine._adapter.flat.grad.clone(), engine._loss.clone()


def results(engine):
    """Of evaluation, log-probabilities with and without dropout, two steps, and generation."""
    yield gradient(engine)[0].numpy()
    for _ in range(2):
        yield engine.evaluate(PACKED).loss_sum
        engine.forward_backward(DOCUMENTS, divisor=30)
        yield float(engine.optim_step(lr=1e-2, max_grad_norm=1.0).grad_norm)
    yield from (engine.target_logprobs(PACKED, dropout=on) for on in (True, False))
    yield engine.logprobs(PACKED)
    yield [*islice(engine.generate(np.array([5, 6, 7]), choose=lambda logits_V: int(logits_V.argmax())), 4)]
    yield from engine.adapter_state().values()


FORMATS = [
    ("none", "float32"), ("none", "bfloat16"), ("nf4", "float32"), ("nf4", "bfloat16"), ("affine4", "float32"),
    ("affine4", "bfloat16"), ("int8", "float32"), ("int8", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "dtype"), FORMATS)
def test_streamed_layers_give_the_same_bits(load, quantization, dtype):
    expected = list(results(load(quantization=quantization, dtype=dtype, how=KEEP_ALL)))
    assert np.linalg.norm(expected[0]) > 0.1
    for slots in (1, 2, 3, NUM_LAYERS):
        engine = load(slots, quantization=quantization, dtype=dtype)
        assert all(map(np.array_equal, results(engine), expected)), slots
