"""MLX's quantization on torch: the bytes and numbers of `mx.quantize`, frozen layers, and what does not fit."""

import gc
import json
import weakref

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dualtune_torch.weights import affine, affine_model  # noqa: E402
from dualtune_torch.weights.affine import AffineEmbedding, AffineLayer, AffineLinear, dequantize, quantize  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCH = random_batch([16, 16], 96)
PROJECTION = "model.layers.1.mlp.gate_proj"


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def load(open_backend):
    backend = open_backend("torch")

    def load_(model_dir, quantization="auto", dtype="float32", init="pretrained", kernels="auto"):
        spec = AdapterSpec(4, 6.0, 0.0, ("all-linear",))
        return backend.load(
            LoadRequest(model_dir, dtype, quantization, init, spec, OptimizerSpec(), seed=4, kernels=kernels)
        )

    return load_


# --- the bytes --------------------------------------------------------------------------------------------------------


def groups(name, dtype):
    """Weights [O, 128] of a kind."""
    huge = torch.finfo(dtype).max
    return {
        "normal": lambda: randn(256, 128) * 0.02,
        "wide": lambda: randn(64, 128) * torch.logspace(-20, 4, 64)[:, None],
        "none below zero": lambda: randn(32, 128).abs() + 0.1,
        "none above zero": lambda: -randn(32, 128).abs() - 0.1,
        "zero": lambda: torch.tensor([0.0, -0.0]).repeat(2, 64),
        "constant": lambda: torch.tensor([0.3, -0.3, 1e-9, -7.0])[:, None].repeat(1, 128),
        "one that is not zero": lambda: torch.eye(64).repeat(1, 2) * 3,
        "ties": lambda: torch.randint(-8, 8, (64, 128), generator=torch.Generator().manual_seed(0)) / 2,
        "below the least scale": lambda: randn(16, 128) * 1e-8,
        "denormal": lambda: randn(16, 128) * (1e-40 if dtype != torch.float16 else 1e-6),
        "huge": lambda: (torch.rand(16, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1) * huge,
    }[name]().to(dtype)


KINDS = ("normal", "wide", "none below zero", "none above zero", "zero", "constant", "one that is not zero", "ties",
         "below the least scale", "denormal", "huge")  # fmt: skip


def as_mlx(tensor):
    mx = pytest.importorskip("mlx.core")
    return mx.array(tensor.float().numpy()).astype(getattr(mx, str(tensor.dtype).removeprefix("torch.")))


def same_bits(found, expected):
    """A torch tensor and an MLX array of the same dtype, compared in float32, which holds both exactly."""
    mx = pytest.importorskip("mlx.core")
    assert str(expected.dtype).removeprefix("mlx.core.") == str(found.dtype).removeprefix("torch.")
    return found.float().numpy().tobytes() == np.array(expected.astype(mx.float32)).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_those_of_mlx(kind, bits, dtype):
    mx = pytest.importorskip("mlx.core")
    weight = groups(kind, dtype)
    words, scales, biases = mx.quantize(as_mlx(weight), 64, bits)
    packed = quantize(weight, bits)
    assert packed.bits == bits
    assert packed.weight_OW.numpy().tobytes() == np.array(words).tobytes()
    assert same_bits(packed.scales_OG, scales) and same_bits(packed.biases_OG, biases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_numbers_are_those_of_mlx(bits, dtype):
    """Of every code, and of scales and biases of another precision than the weights were."""
    mx = pytest.importorskip("mlx.core")
    packed = quantize(torch.cat([groups(kind, dtype) for kind in KINDS if kind != "huge"]), bits)
    for compute in DTYPES:
        ours = packed.cast(compute)
        words = mx.array(ours.weight_OW.numpy().view(np.uint32))
        expected = mx.dequantize(words, as_mlx(ours.scales_OG), as_mlx(ours.biases_OG), 64, bits)
        assert same_bits(dequantize(ours), expected)


def test_a_large_weight_is_quantized_in_pieces_to_the_same_bytes(monkeypatch):
    weight = randn(100, 192)
    whole = quantize(weight, 4)
    monkeypatch.setattr(affine, "WEIGHTS_AT_ONCE", 1000)
    assert all(torch.equal(a, b) for a, b in zip(quantize(weight, 4), whole, strict=True))


def metal(weight, bits):
    """Codes by the rule of Metal's kernel (`affine_quantize` in mlx/backend/metal/kernels/quantized.h), in NumPy."""

    def rounded(x):  # halves away from zero, as Metal's `round`
        return np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x)

    groups = weight.float().numpy().reshape(-1, 64)
    low, high = groups.min(1, keepdims=True), np.maximum(groups.max(1, keepdims=True), np.float32(0))
    scale = np.maximum((high - low) / np.float32(2**bits - 1), np.float32(1e-7))
    side = np.abs(low) > np.abs(high)
    scale, edge = np.where(side, scale, -scale), np.where(side, low, high)
    scale = edge / rounded(edge / scale)  # no group of these weights is at zero
    return np.minimum(rounded((groups - edge) / scale), 2**bits - 1).reshape(weight.shape)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1e-5), ("bfloat16", 3e-3), ("float16", 3e-4)])
def test_metal_s_rule_gives_few_other_codes(dtype, share):
    """What docs/quantization.md says of a model that was quantized on a Mac's GPU. The rule is read, not run."""
    weight = (randn(2048, 1024) * 0.02).to(getattr(torch, dtype))
    pairs = quantize(weight, 4).weight_OW.numpy()
    gaps = np.abs(np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(weight.shape) - metal(weight, 4))
    assert gaps.max() <= 2 and 0 < np.mean(gaps > 0) <= share
    assert np.mean(gaps > 1) <= share / 10  # nearly all by one step


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_computes_with_its_unpacked_weight_and_keeps_nothing(bits):
    """Value and gradient of a plain layer of the same numbers; autograd saves no tensor."""
    packed, bias = quantize(randn(24, 128), bits), torch.nn.Parameter(randn(24, seed=1), requires_grad=False)
    plain = torch.nn.Linear(128, 24)
    plain.weight.data, plain.bias.data = dequantize(packed), bias.data
    x = randn(2, 3, 128, seed=2)
    a, b, kept = x.clone().requires_grad_(), x.clone().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda tensor: tensor):
        y = AffineLinear(packed, bias)(a)
    expected = plain(b)
    (y * randn(2, 3, 24, seed=3)).sum().backward()
    (expected * randn(2, 3, 24, seed=3)).sum().backward()
    assert torch.equal(y, expected) and torch.equal(a.grad, b.grad) and not kept


def test_an_embedding_unpacks_the_rows_of_its_tokens_alone():
    packed, tokens = quantize(randn(50, 64), 4), torch.tensor([[3, 49], [0, 3]])
    assert torch.equal(AffineEmbedding(packed)(tokens), dequantize(packed)[tokens])
    twice = AffineEmbedding(packed, torch.tensor(2.0))(tokens)
    assert torch.equal(twice, 2 * dequantize(packed)[tokens])


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("quantization", "bits"), [("affine4", 4), ("affine8", 8)])
def test_every_matrix_of_whole_groups_is_packed(load, tmp_path, tied, quantization, bits):
    plain = write_tiny_llama(tmp_path / "model", intermediate_size=96, tie_word_embeddings=tied)
    engine = load(plain, quantization)
    stored = load_file(plain / "model.safetensors")
    for path, layer in engine.model.named_modules():
        name = f"{path}.weight"
        if name not in stored or stored[name].ndim != 2:
            continue
        layer = getattr(layer, "base", layer)  # of an adapted one
        if stored[name].shape[1] % 64:
            assert type(layer) is torch.nn.Linear and "down_proj" in name
        else:
            expected = quantize(torch.from_numpy(stored[name]), bits)
            assert isinstance(layer, AffineLayer)
            assert all(torch.equal(a, b) for a, b in zip(layer.packed, expected, strict=True))
    head, embedding = engine.model.get_output_embeddings(), engine.model.get_input_embeddings()
    assert isinstance(head, AffineLinear) and isinstance(embedding, AffineEmbedding)
    assert (head.weight.data_ptr() == embedding.weight.data_ptr()) == tied
    found, weights = engine.description, engine.description.adapted_weights
    assert (found.quantization, found.num_parameters) == (quantization, sum(w.size for w in stored.values()))
    assert found.quantization_reason == "as configured; 2 linear layers are not quantized"
    is_whole = weights["layers"] - 2  # down_proj of two layers is not
    assert weights["four_bit"] == (is_whole if bits == 4 else 0)
    assert "loss" in found.kernels.partition(";")[0], "the fused loss takes a packed head"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_adapter_and_the_scales_have_the_compute_dtype(load, tmp_path, dtype):
    engine = load(write_tiny_llama(tmp_path / "model"), "affine4", dtype)
    layers = [module for module in engine.model.modules() if isinstance(module, AffineLayer)]
    assert {layer.scales.dtype for layer in layers} == {getattr(torch, dtype)}
    assert engine._adapter._compute.dtype == getattr(torch, dtype)
    assert np.isfinite(engine.logprobs(BATCH)).all()


@pytest.mark.parametrize("init", [pytest.param("pretrained", marks=pytest.mark.long), "random"])
def test_no_more_than_one_plain_matrix_is_alive_at_a_time(load, tmp_path, monkeypatch, unscanned, init):
    """A plain 7B model may not fit where the quantized one does."""

    def plain_layers():
        kinds = (torch.nn.Linear, torch.nn.Embedding)
        return sum(type(x) in kinds and x.weight.device.type != "meta" for x in gc.get_objects())

    alive = []

    def counted(weight, bits):
        alive.append(plain_layers())
        return quantize(weight, bits)

    monkeypatch.setattr(affine_model, "quantize", counted)
    engine = load(write_tiny_llama(tmp_path / "model", num_hidden_layers=1), "affine4", init=init)
    assert len(alive) == 7 + 2 and max(alive) <= 2  # the one at hand, and the one before it
    assert np.isfinite(engine.logprobs(BATCH)).all()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_no_more_than_one_weight_is_unpacked_at_a_time(load, tmp_path, monkeypatch, kernels):
    """In the forward and the backward pass, the output head's too."""
    engine, seen, others = load(write_tiny_llama(tmp_path / "model"), "affine4", kernels=kernels), [], []

    def watched(packed):
        numbers = dequantize(packed)
        if numbers.ndim == 2:  # not the rows of an embedding
            others.append(sum(weight() is not None for weight in seen))
            seen.append(weakref.ref(numbers))
        return numbers

    monkeypatch.setattr(AffineLayer, "unpack", staticmethod(watched))
    engine.forward_backward(BATCH, divisor=BATCH.num_targets)
    least = 14 + 1 + 11  # forward, head, and backward: below the first three adapters nothing is asked for
    assert len(others) >= least and max(others) == 0


# --- directories in MLX format ----------------------------------------------------------------------------------------


def write_packed(path, change=lambda tensors: None, bits=4, **config):
    """A directory in MLX's format; `change` edits its tensors in place."""
    write_tiny_llama(path, quantization={"group_size": 64, "bits": bits, "mode": "affine"}, **config)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name, w in tensors.items() if w.ndim == 2]:
        packed = quantize(torch.from_numpy(tensors[name]), bits)
        module = name.removesuffix(".weight")
        tensors[name] = packed.weight_OW.numpy().view(np.uint32)
        tensors |= {f"{module}.scales": packed.scales_OG.numpy(), f"{module}.biases": packed.biases_OG.numpy()}
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "mlx"})
    return path


def test_a_stored_model_keeps_its_bytes(load, tmp_path):
    plain, packed = write_tiny_llama(tmp_path / "plain"), write_packed(tmp_path / "packed")
    engine = load(packed)
    assert (engine.description.quantization, engine.description.quantization_reason) == ("affine4", "as stored")
    assert np.array_equal(engine.logprobs(BATCH), load(plain, "affine4").logprobs(BATCH))
    with pytest.raises(ConfigError, match=r"got 'nf4', but .* is stored quantized as affine4"):
        load(packed, "nf4")
    with pytest.raises(ConfigError, match="the base is quantized"):
        engine.save_merged(tmp_path / "merged")


def test_layers_may_be_plain_or_finer_than_the_rest(load, tmp_path):
    """As mlx-lm writes mixed models, with an entry for each such layer in config.json."""
    original = load_file(write_tiny_llama(tmp_path / "plain") / "model.safetensors")

    def mix(tensors):
        finer = quantize(torch.from_numpy(original["lm_head.weight"]), 8)
        for part, tensor in zip(("weight", "scales", "biases"), finer, strict=True):
            tensors[f"lm_head.{part}"] = tensor.numpy().view(np.uint32) if part == "weight" else tensor.numpy()
        tensors[f"{PROJECTION}.weight"] = original[f"{PROJECTION}.weight"]
        del tensors[f"{PROJECTION}.scales"], tensors[f"{PROJECTION}.biases"]

    path = write_packed(tmp_path / "mixed", mix)
    config = json.loads((path / "config.json").read_text())
    config["quantization"] |= {"lm_head": {"group_size": 64, "bits": 8}, PROJECTION: False}
    (path / "config.json").write_text(json.dumps(config))
    engine = load(path)
    assert engine.model.lm_head.packed.bits == 8
    plain = engine.model.get_submodule(PROJECTION).base
    assert torch.equal(plain.weight, torch.from_numpy(original[f"{PROJECTION}.weight"]))
    assert engine.description.adapted_weights["four_bit"] == 2 * 7 - 1


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def groups_of_32(tensors):
    for part in ("scales", "biases"):
        tensors[f"{PROJECTION}.{part}"] = np.repeat(tensors[f"{PROJECTION}.{part}"], 2, axis=1)


def without_scales(tensors):
    for name in [name for name in tensors if name.endswith((".scales", ".biases"))]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(f"{PROJECTION}.biases"), f"have no tensor '{PROJECTION}.biases'"),
        (drop("model.norm.weight"), "have no tensor 'model.norm.weight'"),
        (drop(f"{PROJECTION}.scales"), f"'{PROJECTION}.weight' is uint32 [128, 8], must be float32 or"),
        (without_scales, "is uint32"),
        (put("model.layers.1.mlp.switch_mlp.scales", np.ones((2, 2), np.float32)), "have 1 tensors that transformers'"),
        (put(f"{PROJECTION}.scales", np.ones((128, 1), np.uint8)), "is uint8 [128, 1], must be float32 or bfloat16"),
        (put(f"{PROJECTION}.weight", np.ones((128, 6), np.uint32)), "is uint32 [128, 6], must be uint32 [128, 8]"),
        (groups_of_32, "is float32 [128, 2], must be float32 or bfloat16 or float16 [128, 1]"),
    ],
)  # fmt: skip
def test_a_directory_that_does_not_fit_is_refused_by_name(load, tmp_path, change, words):
    path = write_packed(tmp_path / "model", change)
    with pytest.raises(EnvironmentFault) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value) and "--platform mlx" in str(caught.value)


def test_what_older_files_hold_beside_the_model_is_left_out(load, tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    path = write_packed(tmp_path / "model", lambda tensors: tensors.update(extra))
    assert load(path).description.quantization == "affine4"
    tied = write_packed(tmp_path / "tied", tie_word_embeddings=True)
    before = load(tied).logprobs(BATCH)
    tensors = load_file(tied / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tied / "model.safetensors")
    assert np.array_equal(load(tied).logprobs(BATCH), before)


@pytest.mark.parametrize(
    ("changes", "quantization", "words"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "auto", "is quantized, but its weights are not"),
        ({"quantization": {"group_size": 64, "bits": 3}}, "auto", "stored quantized as affine 3-bit, groups of 64"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "auto", "mxfp4 4-bit, groups of 32"),
        ({"model_type": "granite", "architectures": ["GraniteForCausalLM"]}, "affine4", "mlx_lm.convert --hf-path"),
    ],
)  # fmt: skip
def test_what_mlx_would_load_otherwise_is_refused_by_name(load, tmp_path, changes, quantization, words):
    path = write_tiny_llama(tmp_path / "model", **changes)
    with pytest.raises(ConfigError) as caught:
        load(path, quantization)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_layer_that_is_more_than_its_matrix_is_refused():
    class Odd(torch.nn.Linear):
        pass

    with pytest.raises(DualtuneError, match=r"transformers' Odd is not a plain matrix"):
        affine_model.finished(Odd(64, 64), "affine4", torch.float32)
