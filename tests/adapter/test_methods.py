"""What every method of the table keeps, whichever it is: a new one is held to it by its line there."""

from typing import get_args

import numpy as np
import pytest

from dualtune.config.schema import AdapterConfig
from dualtune.model.adapter import AdapterSpec, init_adapter, parse_name, tensor_name
from dualtune.model.methods import FULL, LORA, METHODS, NAMES

WEIGHT, RANK = (6, 10), 4
MODULE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_fresh_adapter_has_the_shapes_it_says(method):
    tensors = init_adapter({MODULE: WEIGHT}, RANK, seed=1, method=method.name)
    values = {parse_name(name)[1]: tensor for name, tensor in tensors.items()}
    assert {part: x.shape for part, x in values.items()} == method.shapes(WEIGHT, RANK)
    assert values.keys() == method.parts and all(x.dtype == np.float32 for x in values.values())
    assert sum(x.size for x in values.values()) == method.count(WEIGHT, RANK)


def test_a_fresh_lora_changes_nothing():
    values = LORA.initial(WEIGHT, RANK, np.random.default_rng(0))
    assert values["A"].all() and not values["B"].any()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_names_go_there_and_back(method):
    for parameter in method.parameters:
        name = tensor_name(MODULE, parameter.part, method.name)
        assert name == f"base_model.model.{MODULE}.{parameter.peft}" and parse_name(name) == (MODULE, parameter.part)


def test_no_two_methods_call_different_parts_alike():
    for name in ("peft", "mlx"):
        found = {(getattr(p, name), p.part) for method in METHODS.values() for p in method.parameters}
        assert len({key for key, _ in found}) == len(found) == len({part for _, part in found})


def test_the_config_knows_the_table():
    assert get_args(AdapterConfig.model_fields["method"].annotation) == NAMES == (*METHODS, FULL)


@pytest.mark.parametrize(("scaling", "scale"), [("standard", 1.5), ("rank_stabilized", 3.0)])
def test_the_scale_is_alpha_over_the_rank_or_over_its_root(scaling, scale):
    assert AdapterSpec(4, 6.0, 0.0, (), scaling).scale == scale
