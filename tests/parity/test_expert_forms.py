"""Adapters of experts in all forms: ranks by projection, starts that are kept, the layers that vLLM reads."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, modules_of, parse_name, tensor_name
from dualtune.model.beside import BesideAdapter
from dualtune.model.experts import expert_of
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import naming_of

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

import tiny_families

SPEC = AdapterSpec(4, 6.0, 0.0, ("q_proj", "gate_proj", "up_proj", "down_proj"), experts=True)
LENGTHS = [9, 16, 5, 12]
BATCH = random_batch(LENGTHS, 96)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    keys = tiny_families.FAMILIES["qwen3_moe"]
    return tiny_families.write_family("qwen3_moe", tmp_path_factory.mktemp("experts") / "model", **keys)


@pytest.fixture
def load(backends, model):
    def load_(name, spec):
        request = LoadRequest(model, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=5)
        return backends[name].load(request)

    return load_


def at_tokens(engine):
    logprobs = engine.logprobs(BATCH)
    return np.concatenate([logprobs[row, :length] for row, length in enumerate(LENGTHS)])


def test_a_projection_of_experts_may_have_a_rank_and_an_alpha_of_its_own(load, model, tmp_path):
    spec = dataclasses.replace(
        SPEC, rank_pattern=(("experts.down_proj", 2), ("q_proj", 6)), alpha_pattern=(("experts.up_proj", 3.0),)
    )
    engines = [load(name, spec) for name in ("torch", "mlx")]
    states = [engine.adapter_state() for engine in engines]
    assert_equal(*states)
    ranks = {module: len(states[0][tensor_name(module, "A")]) for module in modules_of(states[0])}
    of_down = {rank for module, rank in ranks.items() if expert_of(module) and module.endswith("down_proj")}
    assert of_down == {2} and {ranks[m] for m in ranks if m.endswith("q_proj")} == {6}
    for engine in engines:
        engine.load_adapter_state(random_adapter(states[0]))
    assert_close(*(gradient(engine, BATCH) for engine in engines), tolerances.GRADIENT)
    state = engines[0].adapter_state()
    for layout in ("dual", "peft"):
        write_adapter(
            tmp_path / layout, Adapter(spec, state, str(model), naming=naming_of(model, modules_of(state))),
            layout=layout,
        )  # fmt: skip
        back = read_adapter(tmp_path / layout)
        changes = [
            {
                module: kind.scale_of(module) * tensors[tensor_name(module, "B")] @ tensors[tensor_name(module, "A")]
                for module in modules_of(tensors)
            }
            for kind, tensors in ((spec, state), (back.spec, back.tensors))
        ]
        assert_close(*changes, 1e-6)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_of_the_weight_is_kept_beside_experts(load, init):
    """Both engines start alike, from the base's function, and what is kept does not move."""
    spec = dataclasses.replace(SPEC, init=init)
    plain, *engines = (load(name, kind) for name, kind in (("torch", SPEC), ("torch", spec), ("mlx", spec)))
    states, expected = [engine.adapter_state() for engine in engines], at_tokens(plain)
    assert_close(*states, 1e-5)
    for engine in engines:
        assert np.abs(at_tokens(engine) - expected).max() <= tolerances.LOGPROBS
        engine.load_adapter_state(states[0])
        engine.forward_backward(BATCH, divisor=BATCH.num_targets)
        engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        moved = engine.adapter_state()
        for name, before in states[0].items():
            module, part = parse_name(name)
            rank, axis = spec.rank_of(module), 0 if part == "A" else 1
            kept, own = (np.take(moved[name] - before, range(*ends), axis) for ends in ((rank, 2 * rank), (0, rank)))
            assert not kept.any(), name
            assert own.any() or expert_of(module), name
    assert_close(*(engine.adapter_state() for engine in engines), 1e-5)


def test_vllm_reads_each_expert_as_layers_of_its_own(load, model, tmp_path):
    """What its loader does (`pack_moe` in vllm/lora/lora_weights.py): stacks of w1, w2 and w3, of one rank."""
    spec = dataclasses.replace(SPEC, rank_pattern=(("experts.down_proj", 2),))
    engine = load("torch", spec)
    state = random_adapter(engine.adapter_state())
    adapter = Adapter(spec, state, str(model), naming=naming_of(model, modules_of(state)))
    write_adapter(tmp_path / "vllm", adapter, layout="vllm")
    config = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    assert {"rank_pattern", "alpha_pattern", "target_parameters", "modules_to_save"}.isdisjoint(config)
    assert (config["r"], config["lora_alpha"]) == (4, 6) and "model.layers.1.mlp.experts.up_proj" in config[
        "target_modules"
    ]
    file = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    for role in ("gate_proj", "down_proj", "up_proj"):
        names = [f"base_model.model.model.layers.1.mlp.experts.{number}.{role}.lora_" for number in range(4)]
        A_ErI, B_EOr = (np.stack([file[f"{name}{part}.weight"] for name in names]) for part in "AB")
        assert A_ErI.shape[1] == B_EOr.shape[2] == 4
        for number, update in enumerate(config["lora_alpha"] / config["r"] * B_EOr @ A_ErI):
            module = f"model.layers.1.mlp.experts.{number}.{role}"
            own = spec.scale_of(module) * state[tensor_name(module, "B")] @ state[tensor_name(module, "A")]
            assert np.abs(update - own).max() <= 1e-6
    back = read_adapter(tmp_path / "vllm")
    assert back.tensors.keys() == state.keys() and back.spec.experts
    engine = load("torch", back.spec)
    engine.load_adapter_state(back.tensors)
    expected = load("torch", spec)
    expected.load_adapter_state(state)
    assert np.abs(at_tokens(engine) - at_tokens(expected)).max() <= tolerances.LOGPROBS
    # In the file of another program the layout is what it is, without dualtune.json.
    (tmp_path / "vllm" / "dualtune.json").unlink()
    assert_equal(read_adapter(tmp_path / "vllm").tensors, back.tensors)


def test_what_vllm_cannot_hold_is_refused(load, model, tmp_path):
    def refused(spec, why, **changes):
        state = random_adapter(load("torch", spec).adapter_state())
        adapter = Adapter(spec, state, str(model), naming=naming_of(model, modules_of(state)), **changes)
        with pytest.raises(ConfigError, match=f"layout: got vllm, but {why}"):
            write_adapter(tmp_path / "vllm", adapter, layout="vllm")
        assert not (tmp_path / "vllm").exists()

    attention = dataclasses.replace(SPEC, experts=False, targets=("q_proj",))
    refused(dataclasses.replace(attention, method="dora"), "vLLM loads no adapters of the method dora")
    refused(dataclasses.replace(attention, beside=BesideAdapter(("norm",))), "vLLM loads no parameters of the base")
    missing = "vLLM loads gate, up and down of every expert .* model.layers.1.mlp.experts.up_proj has no adapter"
    refused(dataclasses.replace(SPEC, targets=("gate_proj", "down_proj")), missing)
