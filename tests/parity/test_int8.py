"""int8: one rule in NumPy, its bits on both backends, one function of both engines, and a run that moves."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, norm_of, random_adapter
from dualtune.model.adapter import AdapterSpec
from dualtune.model.int8 import LEAST_SCALE, dequantize, is_quantized, quantize
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.hooks import Hook

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")
pytest.importorskip("transformers")

from dualtune_mlx import int8 as on_mlx  # noqa: E402
from dualtune_torch.weights import int8 as on_torch  # noqa: E402

LOGITS = 1e-4
BYTES_PER_PARAMETER = 1.002  # of rows with 2,048 weights


def randn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


WEIGHTS = {
    "normal": 0.02 * randn(700, 1999),  # quantized in several parts
    "heavy tails": np.random.default_rng(1).standard_t(4, (64, 300)).astype(np.float32),
    "zeros among others": randn(6, 64) * np.array([1, 0, 1, 0, 0, 1], np.float32)[:, None],
    "an outlier": np.concatenate([randn(8, 63), np.full((8, 1), 1e30, np.float32)], axis=1),
    "one element in a row": np.array([[0.3], [-7.0], [0.0], [-0.0]], np.float32),
    "ties": np.concatenate([np.arange(-126.5, 127, 1), [127]]).astype(np.float32)[None],
    "below the least scale": randn(4, 8) * np.array([1e-38, 1e-37, 1e-36, 1e-33], np.float32)[:, None],
}


@pytest.fixture(params=WEIGHTS)
def weight(request):
    return WEIGHTS[request.param]


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_the_error_is_at_most_half_a_scale_and_zero_is_exact(weight):
    with np.errstate(divide="raise", invalid="raise"):
        codes, scale = quantize(weight)
    assert (codes.dtype, scale.dtype, codes.shape, scale.shape) == (np.int8, np.float32, weight.shape, weight.shape[:1])
    assert np.abs(codes).max() <= 127 and np.isfinite(scale).all()
    found = dequantize(codes, scale)
    assert found.dtype == np.float32 and not found[weight == 0].any()
    bound = np.where(scale > 0, scale.astype(np.float64) * (0.5 + 2**-16), 127 * LEAST_SCALE)
    assert (np.abs(found.astype(np.float64) - weight) <= bound[:, None]).all()
    assert (np.abs(found - weight).mean() <= 0.005 * np.abs(weight).max()) or not scale.any()


def test_the_rule_by_hand():
    codes, scale = quantize(np.array([[127, 0.5, 1.5, -2.5], [0, 0, 0, 0], [-25.4, 25.4, 0.1, -0.3]], np.float32))
    assert codes.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [-127, 127, 0, -2]]  # half to even: 0.5 → 0, 1.5 → 2
    assert scale.tolist() == [1, 0, np.float32(25.4) / np.float32(127)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_backends_compute_the_same_bits(weight, dtype):
    weight = np.clip(weight, -6e4, 6e4)  # the largest float16
    stored = torch.from_numpy(weight).to(getattr(torch, dtype))
    codes, scale = quantize(stored.float().numpy())
    numbers = torch.from_numpy(dequantize(codes, scale)).to(stored.dtype).float().numpy()
    here = on_torch.quantize(stored)
    there = on_mlx.quantize(mx.array(weight).astype(getattr(mx, dtype)))
    assert [x.numpy().tobytes() for x in here] == [codes.tobytes(), scale.tobytes()]
    assert [np.array(x).tobytes() for x in there] == [codes.tobytes(), scale.tobytes()]
    assert np.array_equal(on_torch.dequantize(*here, stored.dtype).float().numpy(), numbers)
    assert np.array_equal(np.array(on_mlx.dequantize(*there, getattr(mx, dtype)).astype(mx.float32)), numbers)


def test_a_weight_takes_little_more_than_a_byte():
    codes, scale = on_torch.quantize(torch.ones(16, 2048))
    assert codes.nbytes + scale.nbytes <= BYTES_PER_PARAMETER * 16 * 2048


# --- the engines ------------------------------------------------------------------------------------------------------


def load(backend, model_dir, quantization="int8", **options):
    settings = {"dtype": "float32", "init": "pretrained", "optimizer": OptimizerSpec(), "seed": 4} | options
    spec = AdapterSpec(8, 12.0, 0.0, ("all-linear",))
    engine = backend.load(LoadRequest(model_dir=model_dir, quantization=quantization, adapter=spec, **settings))
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine


def is_packed(name, tensor):
    """Whether a tensor of a model file belongs to a linear layer that int8 quantizes."""
    return name.endswith("proj.weight") and tensor.ndim == 2 and is_quantized(name.removesuffix(".weight"))


@pytest.fixture(scope="module")
def unpacked(material, tmp_path_factory):
    """The model with the weights that the rule gives, as plain numbers."""
    path = tmp_path_factory.mktemp("unpacked") / "model"
    shutil.copytree(material.model_dir, path)
    tensors = load_file(path / "model.safetensors")
    changed = {n: dequantize(*quantize(w)).astype(w.dtype) for n, w in tensors.items() if is_packed(n, w)}
    assert len(changed) % 7 == 0 and changed
    save_file(tensors | changed, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_both_engines_compute_with_the_unpacked_weights(backends, material, unpacked, kernels):
    batch = material.batch()
    plain, exact = (load(backends["torch"], d, "none", kernels="reference") for d in (unpacked, material.model_dir))
    expected, slopes = plain.logprobs(batch), gradient(plain, batch)
    for backend in backends.values():
        engine = load(backend, material.model_dir, kernels=kernels)
        assert engine.description.quantization == "int8"
        assert material.gap(engine.logprobs(batch), expected) <= material.tolerance
        assert_close(gradient(engine, batch), slopes, tolerances.GRADIENT)
        weights = engine.description.adapted_weights
        assert weights["parameters"] < weights["bytes"] < 1.1 * weights["parameters"] and not weights["four_bit"]
    difference = norm_of({n: slopes[n] - g for n, g in gradient(exact, batch).items()})
    assert difference > 10 * tolerances.GRADIENT * norm_of(slopes), "as without quantization, so nothing is shown"


def test_gpt2_and_random_weights_are_quantized_too(backends, gpt2, tmp_path):
    batch = gpt2.batch()
    here, there = (load(backends[name], gpt2.model_dir) for name in ("torch", "mlx"))
    assert here.description.adapted_weights == there.description.adapted_weights
    assert gpt2.gap(here.logprobs(batch), there.logprobs(batch)) <= gpt2.tolerance
    assert_close(gradient(here, batch), gradient(there, batch), tolerances.GRADIENT)
    for backend in backends.values():
        engine = load(backend, gpt2.model_dir, init="random")
        assert engine.description.adapted_weights == here.description.adapted_weights


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_merge_is_refused(backends, gpt2, tmp_path, name):
    with pytest.raises(ConfigError, match="quantized"):
        load(backends[name], gpt2.model_dir).save_merged(tmp_path / "merged")


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = {"steps": 6, "learning_rate": 1e-3}


class Stop(Hook):
    def on_step(self, record):
        if record.step == 3:
            raise KeyboardInterrupt


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("material", ["tiny"], indirect=True)
def test_a_run_moves_to_the_other_backend(backends, material, tmp_path):
    def config(name):
        return material.config(
            tmp_path / name, model={"quantization": "int8"}, adapter={"dropout": 0.3}, train=RUN,
            run={"dir": str(tmp_path / name), "save_every": 2, "eval_every": None},
        )  # fmt: skip

    straight = run(config("straight"), backends["torch"])
    with pytest.raises(KeyboardInterrupt):
        run(config("moved"), backends["mlx"], [Stop()])
    moved = run(config("moved"), backends["torch"])
    assert len(losses(moved.run_dir)) == RUN["steps"]
    assert losses(moved.run_dir) == pytest.approx(losses(straight.run_dir), abs=tolerances.RESUMED_LOSS)
    manifest = json.loads((moved.adapter_dir / "dualtune.json").read_text())
    assert "int8" in json.dumps(manifest)
