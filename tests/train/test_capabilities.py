"""What a backend does not honour is refused before anything else happens, every key at once and by name."""

import pytest

from dualtune.backend import get_backend
from dualtune.capabilities import Declared, check_capabilities, check_value
from dualtune.errors import ConfigError
from dualtune.optimizer import OPTIMIZERS
from dualtune.train.prepare import prepare

UNSUPPORTED = {
    "memory.checkpointing": ("full", "full"),
    "memory.offload": ("none", "none"),
    "memory.limit": ("8GB", "8GB"),
    "hybrid.enabled": (True, "true"),
}


@pytest.mark.parametrize(("name", "quantization"), [("mlx", "nf4"), ("mlx", "int8"), ("torch", "int8")])
def test_every_unsupported_key_is_named_at_once(open_backend, make_config, name, quantization):
    """Neither the data nor the model exists: nothing is looked at before."""
    wanted = {"model.quantization": (quantization, quantization)} | UNSUPPORTED
    config = make_config("no.jsonl", {key: value for key, (value, _) in wanted.items()}, model="no/model/here")
    with pytest.raises(ConfigError) as caught:
        prepare(config, open_backend(name))
    lines = [line.split(f", the backend '{name}' honours: ") for line in str(caught.value).splitlines()]
    assert [got for got, _ in lines] == [f"{key}: got {shown}" for key, (_, shown) in wanted.items()]
    assert all(honoured for _, honoured in lines)


def test_what_is_honoured_is_listed(open_backend):
    with pytest.raises(ConfigError) as caught:
        check_value(open_backend("torch"), "model.quantization", "int8")
    honoured = "affine4, affine8, auto, nf4, none"
    assert str(caught.value) == f"model.quantization: got int8, the backend 'torch' honours: {honoured}"


def test_an_optimizer_that_a_backend_does_not_name_is_refused(open_backend, make_config):
    """A backend from before there was a choice names none: it has AdamW, which is the default."""
    config = make_config("no.jsonl", {"train.optimizer": "sgd"}, model="no/model/here")
    with pytest.raises(ConfigError) as caught:
        check_capabilities(Declared("mine", {}), config)
    assert str(caught.value) == "train.optimizer: got sgd, the backend 'mine' honours: adamw"
    for name in ("numpy", "torch", "mlx"):
        assert open_backend(name).capabilities()["train.optimizer"] == OPTIMIZERS.keys()


def test_an_unknown_backend_and_an_unknown_device():
    with pytest.raises(ConfigError, match=r"backend: got 'jax', allowed: mlx, numpy, torch"):
        get_backend("jax")
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"device: got 'tpu', the backend 'torch' has: auto, cpu, cuda"):
        get_backend("torch", "tpu")
