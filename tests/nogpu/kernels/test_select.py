"""Which Triton kernels a model gets: by device, by DUALTUNE_KERNELS, by bytes, and by trial."""

from collections import Counter

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dualtune_torch.kernels.gpu import select  # noqa: E402

BATCH = random_batch([9, 14, 5], 96)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def load(open_backend, tiny_llama):
    backend = open_backend("torch")

    def load_(kernels="auto", quantization="none"):
        spec = AdapterSpec(4, 6.0, 0.3, ("all-linear",))
        request = LoadRequest(
            tiny_llama, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=4, kernels=kernels
        )
        engine = backend.load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The CPU passes for a GPU, whose kernels are those that the test gives."""
    monkeypatch.setattr(select, "_why_impossible", lambda device: None)
    return lambda **kernels: monkeypatch.setattr(select, "KERNELS", kernels)


# --- by device and by hand --------------------------------------------------------------------------------------------


def test_a_cpu_gets_none_and_nothing_is_said(load):
    assert "Triton" not in load().description.kernels


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_an_unknown_choice_is_an_error(kernels, load, monkeypatch):
    monkeypatch.setenv("DUALTUNE_KERNELS", "cuda")
    with pytest.raises(ConfigError, match=r"^DUALTUNE_KERNELS: got 'cuda', allowed: auto, triton, torch\. Unset it"):
        load(kernels)


def test_triton_on_a_cpu_is_an_error(load, monkeypatch):
    monkeypatch.setenv("DUALTUNE_KERNELS", "triton")
    with pytest.raises(ConfigError, match=r"got triton, but the device is cpu, and they are for NVIDIA GPUs\. Set"):
        load()


def test_why_a_gpu_gets_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(select, "find_spec", lambda name: name)
    assert select.why_not(GPU) == "the GPU has compute capability 7.5, they need 8.0"
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    assert select.why_not(GPU) == "Triton is not installed"
    monkeypatch.setenv("DUALTUNE_KERNELS", "torch")
    assert select.why_not(GPU) == "DUALTUNE_KERNELS=torch"


# --- by trial ---------------------------------------------------------------------------------------------------------


def test_what_passes_is_used_and_what_fails_is_named(load, on_a_gpu):
    def wrong(model):
        raise ValueError("unpacks 3 of 4096 weights differently\nand more")

    on_a_gpu(right=lambda model: {}, wrong=wrong, needless=lambda model: None)
    said = load().description.kernels
    assert said.split("; ")[0].endswith(", right")
    assert "; wrong plain: unpacks 3 of 4096 weights differently" in said
    assert "needless" not in said
    with pytest.raises(ConfigError, match="wrong plain: unpacks 3"):
        load("fused")


def test_out_of_memory_is_no_verdict_on_a_kernel(load, on_a_gpu):
    def short_of_memory(model):
        raise torch.OutOfMemoryError("CUDA out of memory")

    on_a_gpu(any=short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        load()


# --- by bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "rank", "cache_mb", "pays"),
    [(8192, 16, 50, True), (8192, 16, 72, False), (8192, 32, 50, False), (2048, 16, 50, False), (8192, 8, 50, True)],
    ids=["an H100", "a larger cache", "a larger rank", "fewer tokens", "a smaller rank"],
)
def test_one_pass_over_g_pays_beyond_the_cache_and_for_small_ranks(tokens, rank, cache_mb, pays):
    pytest.importorskip("triton")
    from dualtune_torch.kernels.gpu import lora_back_g

    assert lora_back_g.pays(tokens, 4096, rank, cache_mb * 10**6) is pays


# --- in the model -----------------------------------------------------------------------------------------------------


def test_a_group_computes_the_same_with_all_pieces_replaced(load, on_a_gpu):
    """By the plain code beside each kernel, which has the kernel's arguments: the way to and from it is right."""
    pytest.importorskip("triton")
    from dualtune_torch.kernels.gpu import lora_back_g, lora_da, lora_down, lora_dx

    calls = Counter()

    def counted(name, function):
        return lambda *args: (calls.update([name]), function(*args))[1]

    functions = {
        "down": lora_down.reference, "add_dx": lora_dx.reference, "add_dA": lora_da.reference,
        "back_g": lora_back_g.reference,
    }  # fmt: skip
    on_a_gpu(all=lambda model: {name: counted(name, function) for name, function in functions.items()})
    engine, plain = load(), load("reference")
    assert_close(gradient(engine, BATCH), gradient(plain, BATCH), tolerances.GRADIENT)
    layers = len(engine.model.base_model.layers)
    # Four groups a layer, of seven adapted matrices; nothing below the first group needs a gradient.
    assert calls == {"down": 4 * layers, "add_dA": 4 * layers, "back_g": 7 * layers, "add_dx": 4 * layers - 1}


@pytest.mark.parametrize("quantization", ["nf4", "affine4"])
def test_layers_unpack_by_what_they_are_told(quantization, load, on_a_gpu):
    """A function that doubles every weight must be seen in the logits, and in the gradient below the layer."""
    pytest.importorskip("bitsandbytes")
    from dualtune_torch.weights import nf4
    from dualtune_torch.weights.affine import AffineLayer, dequantize

    def install(factor):
        def install_(model):
            for module in model.modules():
                if isinstance(module, AffineLayer):
                    module.unpack = lambda packed: factor * dequantize(packed)
                elif nf4.is_nf4(module):
                    nf4.unpack_by(module, lambda codes, state: factor * nf4.unpack(codes, state))
            return {}

        return {"unpack": install_}

    expected = load(quantization=quantization)
    on_a_gpu(**install(1))
    same = load(quantization=quantization)
    on_a_gpu(**install(2))
    other = load(quantization=quantization)
    losses = [engine.evaluate(BATCH).loss_sum for engine in (expected, same, other)]
    assert losses[0] == losses[1] != losses[2]
    of_expected, of_same, of_other = (gradient(engine, BATCH) for engine in (expected, same, other))
    assert_close(of_same, of_expected, tolerances.GRADIENT)
    assert any(np.abs(of_other[name] - of_expected[name]).max() > 1e-3 for name in of_expected)


def test_one_token_is_multiplied_by_the_packed_weight(load, monkeypatch):
    """bitsandbytes' own kernel for it reads a ninth of the bytes. Where rows are made of whole blocks: see `unpack`."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from dualtune_torch.weights import nf4

    engine = load(quantization="nf4")
    layer = next(each for each in engine.model.modules() if nf4.is_nf4(each) and each.in_features == nf4.BLOCK_SIZE)
    own = Counter()
    forward = bitsandbytes.nn.Linear4bit.forward
    monkeypatch.setattr(
        bitsandbytes.nn.Linear4bit, "forward", lambda self, x: (own.update([x.shape[0]]), forward(self, x))[1]
    )
    unpacked = Counter()
    nf4.unpack_by(layer, lambda codes, state: (unpacked.update([1]), torch.zeros(state.shape))[1])
    layer(torch.ones(1, layer.in_features))
    layer(torch.ones(2, layer.in_features))
    assert (own, unpacked) == ({1: 1}, {1: 1})
