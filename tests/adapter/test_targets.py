"""Which linear layers a list of targets selects: experts, routers, towers, and families without the default names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import AdapterSpec, pattern_of
from dualtune.model.targets import ALL_LINEAR, DEFAULT_TARGETS, adapted_as, select_modules, value_of

ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
DENSE = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
SHARED = ["model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mlp.shared_expert_gate"]
EXPERTS = ["model.layers.1.mlp.experts.3.up_proj", "model.layers.1.mlp.switch_mlp.up_proj"]
ROUTERS = ["model.layers.1.mlp.gate", "model.layers.2.router.layer"]
TOWER = ["vision_tower.layers.0.self_attn.q_proj", "model.visual.merger.mlp.0"]
HEAD = ["lm_head", "embed_out", "unembed"]  # the second is GPT-NeoX's, the third Inkling's


def chosen(available: list[str], *targets: str, layers: str = "all") -> set[str]:
    return {*select_modules(dict.fromkeys(available, (4, 4)), targets, layers)}


TWELVE = [
    *(f"model.layers.{i}.self_attn.{n}_proj" for i in range(12) for n in "qv"),
    "vision.layers.20.q_proj",
    "lm_head",
]


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("first 2", [0, 1]), ("last 3", [9, 10, 11]), ("last 12", range(12)), ("4-6", [4, 5, 6]),
        ("0,3,10-11", [0, 3, 10, 11]),
    ],
)  # fmt: skip
def test_layers_are_chosen_by_number(layers, numbers):
    """Of the text model, whose layers alone are counted. The head is in no layer: it is adapted if it is named."""
    queries = {f"model.layers.{i}.self_attn.q_proj" for i in numbers}
    assert chosen(TWELVE, "q_proj", layers=layers) == queries
    assert chosen(TWELVE, "q_proj", "lm_head", layers=layers) == queries | {"lm_head"}
    values = {name.replace("q_proj", "v_proj") for name in queries}
    assert chosen(TWELVE, ALL_LINEAR, layers=layers) == queries | values


@pytest.mark.parametrize("layers", ["last 13", "first 13", "12", "4-12", "6-4", "0,6-4"])
def test_layers_that_a_model_does_not_have_are_refused(layers):
    with pytest.raises(ConfigError, match=f"adapter.layers: got {layers}, but the model has 12 layers"):
        chosen(TWELVE, "q_proj", layers=layers)
    with pytest.raises(
        ConfigError, match=r"adapter.layers: got 0-2, but none of these layers has 'layers.3.self_attn.q"
    ):
        chosen(TWELVE, "layers.3.self_attn.q_proj", layers="0-2")


def test_all_linear_leaves_out_what_has_to_be_named() -> None:
    everything = [*ATTENTION, *DENSE, *SHARED, *EXPERTS, *ROUTERS, *TOWER, *HEAD]
    assert chosen(everything, ALL_LINEAR) == {*ATTENTION, *DENSE, *SHARED}


def test_the_default_names_select_no_expert_and_no_tower() -> None:
    assert chosen([*ATTENTION, *DENSE, *EXPERTS, *TOWER], *DEFAULT_TARGETS) == {*ATTENTION, *DENSE}


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("gate", ROUTERS[0]),
        ("experts.3.up_proj", EXPERTS[0]),
        ("switch_mlp.up_proj", EXPERTS[1]),
        (EXPERTS[0], EXPERTS[0]),
        (TOWER[0], TOWER[0]),
        ("lm_head", HEAD[0]),
    ],
)
def test_what_is_named_is_adapted(target: str, module: str) -> None:
    assert chosen([*ATTENTION, *EXPERTS, *ROUTERS, *TOWER, *HEAD], target) == {module}


def test_a_family_without_the_default_names_is_adapted_whole() -> None:
    fused = ["transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc", *HEAD]
    assert chosen(fused, *DEFAULT_TARGETS) == {*fused[:2]}
    why = adapted_as(fused, DEFAULT_TARGETS)
    assert why is not None
    assert "q_proj" in why
    assert adapted_as([*ATTENTION, *DENSE], DEFAULT_TARGETS) is None


def test_a_target_that_selects_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer is called 'up_proj'"):
        chosen([*ATTENTION, *EXPERTS], "q_proj", "up_proj")


LAYERS = {f"model.layers.{i}.{name}": (4, 4) for i in (0, 1, 11) for name in ("self_attn.q_proj", "mlp.up_proj")}


def test_the_first_name_that_selects_a_module_gives_its_rank_and_alpha():
    spec = AdapterSpec(
        8, 16.0, 0.0, ("q_proj", "up_proj"), rank_pattern=(("layers.1.self_attn.q_proj", 2), ("q_proj", 4)),
        alpha_pattern=(("layers.1.self_attn.q_proj", 4.0),),
    )  # fmt: skip
    assert [*spec.select(LAYERS)] == sorted(LAYERS)
    found = {module: (spec.rank_of(module), spec.scale_of(module)) for module in LAYERS}
    assert found["model.layers.0.self_attn.q_proj"] == found["model.layers.11.self_attn.q_proj"] == (4, 4.0)
    assert found["model.layers.1.self_attn.q_proj"] == (2, 2.0) and found["model.layers.1.mlp.up_proj"] == (8, 2.0)
    rooted = replace(spec, scaling="rank_stabilized")
    assert rooted.scale_of("model.layers.1.self_attn.q_proj") == 4 / 2**0.5


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ((("v_proj", 4),), "adapter.rank_pattern: no adapted layer is called 'v_proj'. The adapter has: q_proj, up_"),
        ((("layers.2.mlp.up_proj", 4),), "no adapted layer is called 'layers.2.mlp.up_proj'"),
        ((("q_proj", 4), ("layers.1.self_attn.q_proj", 2)), "'layers.1.self_attn.q_proj' has no effect"),
    ],
)  # fmt: skip
def test_a_pattern_without_effect_is_refused(pattern, message):
    spec = AdapterSpec(8, 16.0, 0.0, ("q_proj", "up_proj"), rank_pattern=pattern)
    with pytest.raises(ConfigError, match=re.escape(message)):
        spec.select(LAYERS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"q_proj": 4}, (("q_proj", 4),)),
        ({"layers.1.self_attn.q_proj": 4}, (("model.layers.1.self_attn.q_proj", 4),)),
        ({"layers.1.self_attn.q_proj": 2, "q_proj": 4}, None),
    ],
)
def test_a_pattern_of_values_is_as_short_as_it_can_be(changes, expected):
    values = {module: value_of(module, tuple(changes.items()), 8) for module in LAYERS}
    pattern = pattern_of(values, 8)
    assert expected is None or pattern == expected
    assert {module: value_of(module, pattern, 8) for module in LAYERS} == values
    assert pattern_of(values, 8, tuple(changes.items())) == tuple(changes.items())


def test_a_path_that_ends_as_another_has_its_own_value():
    values = {"b": 3, "a.b": 8}
    assert {module: value_of(module, pattern_of(values, 8), 8) for module in values} == values
