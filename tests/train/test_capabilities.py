"""What a backend does not honour is refused before anything else happens, every key at once and by name."""

from typing import get_args

import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import get_backend
from dualtune.engine.capabilities import check_capabilities, check_value
from dualtune.engine.card import INSTALLED, Card, Device, card_of
from dualtune.model.optimizer import OptimizerName
from dualtune.train.prepare import prepare


@pytest.mark.parametrize(("name", "quantization"), [("numpy", "nf4"), ("numpy", "int8")])
def test_every_unsupported_key_is_named_at_once(open_backend, make_config, name, quantization):
    """Neither the data nor the model exists: nothing is looked at before."""
    wanted = {"model.quantization": quantization, "memory.sharding": "full"}
    with pytest.raises(ConfigError) as caught:
        prepare(make_config("no.jsonl", wanted, model="no/model/here"), open_backend(name))
    lines = str(caught.value).splitlines()
    split = [line.split(f", the backend '{name}' honours: ") for line in lines]
    assert [got for got, _ in split] == [f"{key}: got {value}" for key, value in wanted.items()]
    assert all(honoured for _, honoured in split)


@pytest.mark.parametrize("value", ["auto", "none"])
@pytest.mark.parametrize("name", ["torch", "mlx", "numpy"])
def test_a_value_that_is_true_anyway_is_not_refused(make_config, name, value):
    """Nothing moves to host memory, so `none` describes every backend."""
    check_capabilities(card_of(name), make_config("no.jsonl", {"memory.offload": value}))


def test_a_mapping_and_a_size_are_honoured_by_their_kind(make_config):
    """Their values are infinitely many, so a card names the kind."""
    config = make_config("no.jsonl", {"memory.limit": "8GB", "memory.checkpointing": {"layers": 2}})
    for name in ("torch", "mlx"):
        check_capabilities(card_of(name), config)
    with pytest.raises(ConfigError) as caught:
        check_capabilities(card_of("numpy"), config)
    assert str(caught.value).splitlines() == [
        "memory.checkpointing: got {layers: …}, the backend 'numpy' honours: auto",
        "memory.limit: got a size such as 12GB, the backend 'numpy' honours: auto",
    ]


def test_what_is_honoured_is_listed(open_backend, wording):
    with pytest.raises(ConfigError) as caught:
        check_value(open_backend("mlx"), "model.quantization", "nf4")
    wording(str(caught.value))


def test_an_optimizer_that_a_backend_does_not_name_is_refused(open_backend, make_config, wording):
    """A backend from before there was a choice names none: it has AdamW, which is the default."""
    config = make_config("no.jsonl", {"train.optimizer": "sgd"}, model="no/model/here")
    with pytest.raises(ConfigError) as caught:
        check_capabilities(Card(name="mine", devices=(Device("cpu", "float32"),)), config)
    wording(str(caught.value))
    for name in ("numpy", "torch", "mlx"):
        assert open_backend(name).capabilities()["train.optimizer"] == {*get_args(OptimizerName), INSTALLED}


def test_a_number_is_refused_by_a_backend_without_the_key(make_config):
    """And what is no number describes every backend."""
    card = Card(name="mine", devices=(Device("cpu", "float32"),))
    for value, line in ((16.0, "a number such as 2, the backend 'mine' honours: null"), (None, None)):
        config = make_config("no.jsonl", {"train.lora_plus_ratio": value}, model="no/model/here")
        if line is None:
            check_capabilities(card, config)
            continue
        with pytest.raises(ConfigError) as caught:
            check_capabilities(card, config)
        assert str(caught.value) == f"train.lora_plus_ratio: got {line}"
    for name in ("numpy", "torch", "mlx"):
        check_capabilities(card_of(name), make_config("no.jsonl", {"train.lora_plus_ratio": 16.0}))


def test_an_unknown_backend_and_an_unknown_device():
    with pytest.raises(ConfigError, match=r"backend: got 'jax', allowed: mlx, numpy, torch"):
        get_backend("jax")
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"device: got 'tpu', the backend 'torch' has: auto, cpu, cuda"):
        get_backend("torch", "tpu")
