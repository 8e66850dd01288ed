"""mlx-lm has one activation, or one epsilon, for a family: both backends compute those of the config."""

import json

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

import tiny_families

SIZES, BATCH = tiny_families.SIZES, tiny_families.BATCH
FAMILIES = {
    "gpt_neox": SIZES | {"intermediate_size": 128},
    "gemma": SIZES,
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 128, "n_inner": 128},
    "starcoder2": SIZES,
    "nanochat": {key: size for key, size in SIZES.items() if key != "head_dim"} | {"num_key_value_heads": 4},
}
SPEC = AdapterSpec(4, 6.0, 0.0, ("all-linear",))


@pytest.fixture
def model(tmp_path):
    def model_(family, **keys):
        return tiny_families.write_family(family, tmp_path / "model", **FAMILIES[family] | keys)

    return model_


def load(backend, directory):
    return backend.load(LoadRequest(directory, "float32", "none", "pretrained", SPEC, OptimizerSpec(), seed=5))


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gpt_neox", {"hidden_act": "gelu"}), ("gpt_neox", {"hidden_act": "gelu_fast"}), ("gemma", {}),
        ("gpt_bigcode", {"activation_function": "gelu"}), ("gpt_bigcode", {}), ("starcoder2", {}), ("nanochat", {}),
    ],
)  # fmt: skip
def test_both_backends_compute_the_function_of_the_config(backends, model, family, keys):
    directory = model(family, **keys)
    engines = [tiny_families.trained(load(backends[name], directory)) for name in ("torch", "mlx")]
    a, b = (tiny_families.at_tokens(engine.logprobs(BATCH)) for engine in engines)
    assert np.abs(a - b).max() <= tolerances.LOGPROBS
    assert_close(*(gradient(engine, BATCH) for engine in engines), tolerances.GRADIENT)


def test_the_gelu_of_published_gemmas_is_the_approximation(backends, model):
    directory = model("gemma")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    a, b = (tiny_families.at_tokens(load(backends[name], directory).logprobs(BATCH)) for name in ("torch", "mlx"))
    assert np.abs(a - b).max() <= tolerances.LOGPROBS


@pytest.mark.parametrize(
    ("family", "keys", "why"),
    [
        ("starcoder2", {"hidden_act": "mish"}, "hidden_act of config.json is 'mish'"),
        ("nanochat", {"rms_norm_eps": 1e-4}, "rms_norm_eps of config.json is 0.0001"),
    ],
)
def test_what_it_does_not_compute_on_mlx_is_refused(backends, model, family, keys, why):
    with pytest.raises(ConfigError, match=f"{why}; on mlx .* Train it with --platform cpu"):
        load(backends["mlx"], model(family, **keys))
