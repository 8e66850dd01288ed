"""4-bit bases, NF4 on torch and affine on MLX: only the adapter learns, by the gradient of the unpacked weights."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient, norm_of, random_adapter
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.state.metrics import read_rows

torch = pytest.importorskip("torch")
bnb = pytest.importorskip("bitsandbytes")
mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
tree_flatten = pytest.importorskip("mlx.utils").tree_flatten

FOUR_BITS = {"torch": "nf4", "mlx": "affine4"}


def load(backend, model_dir, quantization, *, trained=True):
    spec = AdapterSpec(8, 12.0, 0.0, ("all-linear",))
    engine = backend.load(LoadRequest(model_dir, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=4))
    if trained:
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine


@pytest.fixture
def engine(backend, material):
    return load(backend, material.model_dir, FOUR_BITS[backend.name])


def base_bytes(engine):
    """Every number of the base model, packed ones and their scales included."""
    if isinstance(engine.model, torch.nn.Module):
        return {n: w.numpy().tobytes() for n, w in engine.model.state_dict().items() if ".lora_" not in n}
    return {n: np.array(w).tobytes() for n, w in tree_flatten(engine.model.parameters())}


def unpacked(engine):
    """Name in the model's files -> float32 weight, of every quantized layer."""
    weights = {}
    for path, layer in engine.model.named_modules():
        name = path.removesuffix(".base") + ".weight"
        if isinstance(layer, bnb.nn.Linear4bit):
            weights[name] = bnb.functional.dequantize_4bit(layer.weight, layer.weight.quant_state).numpy()
        elif isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            words, scales, biases = (np.array(a) for a in (layer.weight, layer.scales, layer.biases))
            codes = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15  # eight in a word, lowest first
            groups = codes.reshape(*scales.shape, 64)  # [out, groups, 64 inputs]
            weights[name] = (groups * scales[..., None] + biases[..., None]).reshape(len(words), -1)
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


def plain_copy(engine, model_dir, path):
    """The model directory with the quantized weights as plain numbers."""
    shutil.copytree(model_dir, path)
    save_file(load_file(path / "model.safetensors") | unpacked(engine), path / "model.safetensors", {"format": "pt"})
    return path


def test_linear_weights_take_four_bits(engine, backend, material):
    stored = load_file(material.model_dir / "model.safetensors")
    weights = unpacked(engine)
    projections = {n for n in stored if "_proj" in n and (backend.name == "torch" or stored[n].shape[1] % 64 == 0)}
    assert projections <= weights.keys()
    for name in projections:
        error = np.linalg.norm(weights[name] - stored[name]) / np.linalg.norm(stored[name])
        assert 0.02 < error < 0.15, f"{name}: {error}"
        base = dict(engine.model.named_modules())[name.removesuffix(".weight") + ".base"]
        if backend.name == "torch":
            state = base.weight.quant_state
            assert (base.weight.dtype, state.quant_type, state.nested) == (torch.uint8, "nf4", True)
            parts = [base.weight.nbytes, state.absmax.nbytes, state.state2.absmax.nbytes]  # without the constant tables
        else:
            assert isinstance(base, nn.QuantizedLinear)
            assert (base.bits, base.group_size, base.weight.dtype) == (4, 64, mx.uint32)
            parts = [base.weight.nbytes, base.scales.nbytes / 2, base.biases.nbytes / 2]  # of a bfloat16 model
        assert parts[0] == stored[name].size / 2
        assert sum(parts) <= 0.6 * stored[name].size


def test_training_changes_the_adapter_and_nothing_else(backend, material):
    engine, batch = load(backend, material.model_dir, FOUR_BITS[backend.name], trained=False), material.batch()
    before, start = base_bytes(engine), engine.adapter_state()
    first = engine.evaluate(batch).loss_sum
    for _ in range(8):
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        engine.evaluate(batch)
    assert engine.evaluate(batch).loss_sum < 0.9 * first
    after = base_bytes(engine)
    assert before.keys() == after.keys()
    assert not [name for name in before if before[name] != after[name]]
    unchanged = [n for n, w in engine.adapter_state().items() if np.array_equal(w, start[n])]
    assert not unchanged


def test_gradients_survive_an_evaluation(engine, backend, material):
    """bitsandbytes repacks the weights of a Linear4bit in eval mode, on CPUs with AVX512-BF16, for a kernel that has no
    backward pass."""
    batch = material.batch()
    fresh = gradient(load(backend, material.model_dir, FOUR_BITS[backend.name]), batch)
    engine.evaluate(batch)
    engine.logprobs(batch)
    list(engine.generate(batch.tokens_BT[0, :4], choose=lambda logits: None))
    after = gradient(engine, batch)
    assert_equal(after, fresh)
    assert all(np.any(g) for g in after.values())
    packed = [m for m in engine.model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert all(layer.training for layer in packed)


def test_the_gradient_is_that_of_the_unpacked_weights(engine, backend, backends, material, tmp_path):
    """On the plain engines of both backends."""
    model_dir = plain_copy(engine, material.model_dir, tmp_path / "unpacked")
    batch = material.batch()
    expected_logprobs, found = engine.logprobs(batch), gradient(engine, batch)
    for plain_backend in backends.values():
        plain = load(plain_backend, model_dir, "none")
        assert material.gap(plain.logprobs(batch), expected_logprobs) <= material.tolerance
        expected = gradient(plain, batch)
        assert_close(found, expected, tolerances.GRADIENT)
    exact = gradient(load(backend, material.model_dir, "none"), batch)
    difference = norm_of({n: found[n] - exact[n] for n in found})
    assert difference > 100 * tolerances.GRADIENT * norm_of(exact), "as without quantization, so nothing is shown"


def test_the_adapter_of_a_quantized_base_is_one_function_everywhere(backend, material, assert_one_function, tmp_path):
    """On the plain base, as PEFT, mlx-lm and both engines read it."""
    config = material.config(
        tmp_path / "run",
        model={"quantization": FOUR_BITS[backend.name]},
        adapter={"targets": "all-linear"},
        train={"steps": 8, "learning_rate": 1e-2, "schedule": "constant", "warmup": 0},
    )
    result = run(config, backend)
    rows = [row for row in read_rows(result.run_dir / "metrics.jsonl") if "loss" in row]
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    manifest = json.loads((result.adapter_dir / "dualtune.json").read_text())
    assert FOUR_BITS[backend.name] in json.dumps(manifest)
    assert_one_function(material, result.adapter_dir)


def test_a_merge_into_packed_weights_is_refused(engine, tmp_path):
    with pytest.raises(ConfigError, match="quantized"):
        engine.save_merged(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
