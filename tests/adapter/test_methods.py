"""What every method of the table keeps, whichever it is: a new one is held to it by its line there."""

import zlib
from itertools import chain
from typing import get_args

import numpy as np
import pytest

from dualtune.config.schema import AdapterConfig
from dualtune.model.adapter import AdapterSpec, init_adapter, parse_name, tensor_name
from dualtune.model.formats.peft import REFUSED
from dualtune.model.methods import FULL, METHODS, NAMES

WEIGHT, RANK = (6, 10), 4
MODULE = "model.layers.0.mlp.up_proj"


def frozen():
    return np.random.default_rng(3).normal(size=WEIGHT).astype(np.float32)


STARTS = [(method, init) for method in METHODS.values() for init in method.inits]


def fresh(method, init, shape=WEIGHT):
    tensors = init_adapter({MODULE: shape}, RANK, 1, method=method.name, init=init, weight=lambda module: frozen())
    return {parse_name(name)[1]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(("method", "init"), STARTS, ids=lambda each: getattr(each, "name", each))
def test_a_fresh_adapter_has_the_shapes_it_says_and_changes_nothing(method, init):
    values = fresh(method, init)
    assert {part: x.shape for part, x in values.items()} == method.shapes(WEIGHT, RANK)
    assert values.keys() == method.parts and all(x.dtype == np.float32 for x in values.values())
    assert sum(x.size for x in values.values()) == method.count(WEIGHT, RANK)
    np.testing.assert_allclose(method.delta(values, 1.5, frozen), 0, atol=1e-6)


def test_the_starts_of_lora_are_the_documented_distributions():
    """Kaiming with a = √5: uniform with the bound √(6 / ((1 + a²) · in)) = 1 / √in, whose bits every run before had."""
    shape = (6, 40_000)
    uniform, normal = (fresh(METHODS["lora"], init, shape)["A"] for init in ("kaiming", "normal"))
    rng = np.random.default_rng([1, zlib.crc32(MODULE.encode())])
    assert np.array_equal(uniform, rng.uniform(-(40_000**-0.5), 40_000**-0.5, (RANK, 40_000)).astype(np.float32))
    assert uniform.std() == pytest.approx(40_000**-0.5 / 3**0.5, rel=0.01)
    assert normal.std() == pytest.approx(0.02, rel=0.01) and abs(normal.mean()) < 0.02 * 4 / normal.size**0.5
    assert (np.abs(normal) < 0.02).mean() == pytest.approx(0.6827, abs=0.005)  # within one deviation


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_trained_part_moves_the_update(method):
    """From values that are nobody's start, so that no part is multiplied by zero."""
    rng = np.random.default_rng(5)
    values = {part: rng.normal(size=shape) for part, shape in method.shapes(WEIGHT, RANK).items()}
    update = method.delta(values, 1.5, frozen)
    assert update.shape == WEIGHT
    for part, x in values.items():
        changed = method.delta({**values, part: 1.1 * x}, 1.5, frozen)
        assert np.abs(changed - update).max() > 1e-3, part


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_names_go_there_and_back(method):
    for parameter in method.parameters:
        name = tensor_name(MODULE, parameter.part, method.name)
        assert name == f"base_model.model.{MODULE}.{parameter.peft}" and parse_name(name) == (MODULE, parameter.part)


def test_no_two_methods_call_different_parts_alike():
    for name in ("peft", "mlx"):
        found = {(getattr(p, name), p.part) for method in METHODS.values() for p in method.parameters}
        assert len({key for key, _ in found}) == len(found) == len({part for _, part in found})


def test_config_and_readers_know_the_table():
    assert get_args(AdapterConfig.model_fields["method"].annotation) == NAMES == (*METHODS, FULL)
    read = set(chain.from_iterable(method.peft_keys for method in METHODS.values()))
    assert not read & REFUSED.keys()


@pytest.mark.parametrize(("scaling", "scale"), [("standard", 1.5), ("rank_stabilized", 3.0)])
def test_the_scale_is_alpha_over_the_rank_or_over_its_root(scaling, scale):
    assert AdapterSpec(4, 6.0, 0.0, (), scaling).scale == scale
