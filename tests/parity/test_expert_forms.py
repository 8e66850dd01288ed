"""Adapters of experts in all forms that others have: ranks by projection, and starts that are kept."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, modules_of, parse_name, tensor_name
from dualtune.model.experts import expert_of
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import naming_of

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

_spec = importlib.util.spec_from_file_location("tiny_families", Path(__file__).with_name("tiny_families.py"))
assert _spec is not None and _spec.loader is not None
_spec.loader.exec_module(tiny_families := importlib.util.module_from_spec(_spec))
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
