"""A backend's card: what it says for one kind of device and for any, and that the engines do what the cards say."""

import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import Card, Device, automatic_cards, card_of, driver_of, launch_on, platforms
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

TWO = Card(
    "two",
    devices=(Device("cuda", "bfloat16", ("bfloat16",), ("none", "nf4"), "nf4"), Device("cpu", "float32", ("float32",))),
    platforms=("cuda", "cuda:N"),
    honoured={"data.packing": (True,)},
)


def test_each_device_honours_its_own_dtypes_and_quantizations():
    assert TWO.capabilities("cuda") == {
        "model.dtype": {"auto", "bfloat16"},
        "model.quantization": {"auto", "none", "nf4"},
        "memory.offload": {"auto", "none"},
        "hybrid.offload": {"none"},
        "data.packing": {True},
    }
    assert TWO.capabilities("cpu")["model.quantization"] == {"auto", "none"}
    assert TWO.capabilities()["model.dtype"] == {"auto", "bfloat16", "float32"}


@pytest.mark.parametrize(
    ("platform", "present", "kind"),
    [("two", {"cuda", "cpu"}, "cuda"), ("two", {"metal", "cpu"}, "cpu"), ("two", {"metal"}, None),
     ("cuda:1", {"cpu"}, "cuda"), ("cpu", {"cuda", "cpu"}, "cpu")],
)  # fmt: skip
def test_a_platform_means_a_kind_of_device(platform, present, kind):
    assert TWO.kind_for(platform, present) == kind


def test_only_devices_that_are_numbered_take_a_number():
    asked = ("cuda", "cuda:0", "cuda:12", "cuda:", "cuda:N", "cuda:-1", "cpu", "cpu:0")
    assert [each for each in asked if TWO.has_platform(each)] == ["cuda", "cuda:0", "cuda:12"]


def test_the_cards_here_are_found():
    assert [card.name for card in automatic_cards()] == ["torch", "mlx"]
    assert [driver_of(kind).name for kind in ("cuda", "metal", "cpu")] == ["torch", "mlx", "torch"]
    assert platforms() == ["auto", "mlx", "cuda", "cpu", "cuda:N"]
    assert [str(card_of(name)) for name in ("torch", "mlx", "numpy")] == ["torch", "MLX", "NumPy"]


def test_what_nobody_has_is_refused_by_name():
    with pytest.raises(ConfigError, match="backend: got 'jax', allowed: mlx, numpy, torch"):
        card_of("jax")
    with pytest.raises(ConfigError, match="device: got 'tpu', but no registered backend computes on it"):
        driver_of("tpu")
    with pytest.raises(ConfigError, match="--platform: got 'numpy', --on slurm takes cuda or cpu: torchrun runs torch"):
        launch_on("slurm", "numpy")


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
def test_an_engine_is_what_its_card_says(open_backend, name, tiny_llama, tiny_softmax):
    backend = open_backend(name)
    device = card_of(name).device(backend.devices()[0].kind)
    assert device is not None
    assert backend.capabilities() == card_of(name).capabilities(device.kind)
    model = tiny_softmax if name == "numpy" else tiny_llama
    spec = AdapterSpec(2, 4.0, 0.0, ("all-linear",))
    description = backend.load(
        LoadRequest(model, "auto", "auto", "pretrained", spec, OptimizerSpec(), seed=1)
    ).description
    assert (description.device, description.dtype) == (device.kind, device.auto_dtype)
    assert description.quantization in device.quantizations
