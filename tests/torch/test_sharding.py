"""When a base is split among processes, and what is refused then. What processes compute: tests/distributed."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")
import torch
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune_torch import sharding
from dualtune_torch.backend import TorchBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


def request(model, asked, quantization="none"):
    spec = AdapterSpec(2, 4.0, 0.0, ("all-linear",))
    return LoadRequest(model, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=0, sharding=asked)


def decide(model, asked, device=CPU, quantization="none"):
    return sharding.decide(request(model, asked, quantization), torch.float32, quantization, device)


@pytest.fixture
def one_of_two(monkeypatch):
    monkeypatch.setattr(sharding, "joined", lambda: True)


@pytest.fixture
def free(monkeypatch, one_of_two):
    """Sets the free memory of the GPU of this process; the other one agrees."""

    def set_(number_of_bytes):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(number_of_bytes), 1 << 40))
        monkeypatch.setattr(sharding.dist, "all_reduce", lambda tensor, op: None)

    return set_


def test_one_process_holds_all_and_cannot_be_asked_to_split(model):
    engine = TorchBackend("cpu").load(request(model, "auto"))
    assert (engine.description.sharding, engine.description.sharding_reason) == ("none", "one process")
    with pytest.raises(ConfigError, match="got full, but this is one process; allowed: auto or none"):
        TorchBackend("cpu").load(request(model, "full"))


def test_who_does_not_ask_for_its_world_is_alone_whoever_launched_it(model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert TorchBackend("cpu").load(request(model, "auto")).description.sharding_reason == "one process"


@pytest.mark.usefixtures("one_of_two")
def test_what_is_asked_for_is_done_and_nf4_refused(model):
    assert decide(model, "full") == ("full", "as configured")
    assert decide(model, "none") == ("none", "as configured")
    with pytest.raises(
        ConfigError,
        match=r"NF4 weights cannot be sharded.*full: a plain base, or .*affine4; allowed with nf4: none",
    ):
        decide(model, "full", quantization="nf4")


@pytest.mark.usefixtures("one_of_two")
def test_auto_never_splits_on_a_cpu(model):
    chosen, why = decide(model, "auto")
    assert chosen == "none"
    assert "set full to shard anyway" in why


def test_auto_splits_what_does_not_fit(model, free):
    stored = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    free(stored / sharding.LARGEST_SHARE + 2)
    assert decide(model, "auto", CUDA)[0] == "none"
    free(stored / sharding.LARGEST_SHARE - 2)
    chosen, why = decide(model, "auto", CUDA)
    assert chosen == "full"
    assert "does not fit in 80% of each device's free memory" in why
    chosen, why = decide(model, "auto", CUDA, "affine4")
    assert chosen == "none", "4 bits take a sixth of float32"
    free(0)
    assert decide(model, "auto", CUDA, "affine4")[0] == "full"
    chosen, why = decide(model, "auto", CUDA, "nf4")
    assert chosen == "none"
    assert "an nf4 base cannot be sharded" in why


def test_the_device_of_another_process_counts_too(model, free, monkeypatch):
    free(1 << 40)
    monkeypatch.setattr(sharding.dist, "all_reduce", lambda tensor, op: tensor.zero_())
    assert decide(model, "auto", CUDA)[0] == "full"


def test_merging_a_base_that_is_split_is_refused(model, tmp_path):
    engine = TorchBackend("cpu").load(request(model, "auto"))
    engine.description = replace(engine.description, sharding="full")
    with pytest.raises(ConfigError, match="Merge in one process: dualtune adapter merge"):
        engine.save_merged(tmp_path / "merged")


def test_a_model_without_named_layers_is_refused(model):
    engine = TorchBackend("cpu").load(request(model, "auto"))
    engine.model._no_split_modules = None
    with pytest.raises(ConfigError, match="transformers does not list the layers of LlamaForCausalLM"):
        sharding._layers(engine.model)
