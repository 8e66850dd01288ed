"""Bases that mlx-lm quantized in other ways than dualtune does: other groups, other bits, other modes."""

from __future__ import annotations

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

FORMATS = [
    (3, 64, "affine"), (4, 32, "affine"), (5, 64, "affine"), (6, 128, "affine"), (4, 32, "mxfp4"), (8, 32, "mxfp8"),
]  # fmt: skip
BATCH = random_batch([16, 9], 96)


@pytest.fixture(params=FORMATS, ids=lambda how: f"{how[2]}-{how[0]}-bit-groups-of-{how[1]}")
def stored(request, tmp_path):
    """Write a model in one of the formats, as mlx_lm.convert does."""
    mlx_utils = pytest.importorskip("mlx_lm.utils")
    bits, group, mode = request.param
    plain = write_tiny_llama(tmp_path / "plain", hidden_size=128, intermediate_size=256)
    how = {"group_size": group, "bits": bits, "mode": mode}
    model, config = mlx_utils.quantize_model(*mlx_utils.load_model(plain), **how)
    mlx_utils.save_model(tmp_path / "quantized", model)
    mlx_utils.save_config(config, tmp_path / "quantized" / "config.json")
    return tmp_path / "quantized", model


def load(backend, path):
    spec = AdapterSpec(4, 8.0, 0.0, ("q_proj", "gate_proj"))
    return backend.load(LoadRequest(path, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=0))


def test_it_trains_as_it_is_stored(stored, open_backend):
    import mlx.core as mx

    path, model = stored
    engine = load(open_backend("mlx"), path)
    logits = model(mx.array(BATCH.tokens_BT))
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert np.allclose(engine.logprobs(BATCH), expected, atol=1e-4)
    losses = []
    for _ in range(3):
        engine.forward_backward(BATCH, divisor=BATCH.num_targets)
        losses.append(float(engine.optim_step(lr=1e-2, max_grad_norm=1.0).loss))
    assert losses[2] < losses[1] < losses[0]


def test_its_weights_are_read_in_float32(stored):
    """Which starts of adapters and merges need."""
    import mlx.core as mx

    from dualtune_mlx.methods import linear_shape, weight_of

    layer = stored[1].layers[0].self_attn.q_proj
    assert weight_of(layer).shape == linear_shape(layer) == (64, 128)
    assert mx.allclose(mx.eye(128) @ weight_of(layer).T, layer(mx.eye(128)), atol=1e-5)


def test_torch_refuses_it_and_names_the_format(stored, open_backend):
    pytest.importorskip("torch")
    path, _ = stored
    with pytest.raises(ConfigError, match="-bit, groups of"):
        load(open_backend("torch"), path)
