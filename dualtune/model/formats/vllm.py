"""The adapter directory that vLLM reads (`--lora-modules NAME=DIR`): PEFT's files, with layers of single experts.

vLLM (`vllm/lora`, read 2026-11; 0.32 loads what is written for a Qwen3-MoE and a gpt-oss) takes `r`, `lora_alpha`,
`use_rslora` and `target_modules` of adapter_config.json and no patterns, so that one rank and one scale hold for all
layers. Experts are the linear layers of the base's files, `mlp.experts.3.gate_proj`, which it packs: gate, up and down
of every expert of a layer, or none. Families whose experts it keeps fused (gpt-oss) have PEFT's parameters, as in the
layout peft, and need both of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import AdapterSpec, Tensors, modules_of
from dualtune.model.experts import DOWN, GATE, ROLES, UP, expert_of
from dualtune.model.formats.canonical import of_base
from dualtune.model.formats.naming import Naming
from dualtune.model.formats.peft import peft_config

LAYOUT = "vllm"


def check_for_vllm(spec: AdapterSpec, tensors: Mapping[str, Any], naming: Naming) -> None:
    """Raise ConfigError for an adapter that vLLM cannot hold."""
    if problem := _problem(spec, tensors, naming):
        raise ConfigError(f"layout: got {LAYOUT}, but {problem}; allowed: peft, or merge it for vLLM")


def _problem(spec: AdapterSpec, tensors: Mapping[str, Any], naming: Naming) -> str | None:
    if spec.method != "lora":
        return f"vLLM loads no adapters of the method {spec.method}"
    if of_base(dict(tensors)):
        return "vLLM loads no parameters of the base that are trained beside an adapter"
    modules = modules_of(tensors)
    if naming.towers and any(map(expert_of, modules)):
        return "the names that vLLM has for experts of models with other parts are not known here"
    if any(map(expert_of, modules)) and (problem := _no_experts(naming)):
        return problem
    if naming.experts.gate == GATE and any("block_sparse_moe.experts." in module for module in modules):
        return "the names that vLLM has for the experts of Granite's files are not known here"
    if naming.experts.turned and (turned := [name for name in modules if name.endswith((".q_proj", ".k_proj"))]):
        # `permute_qk_weight_for_rotary` of vllm/model_executor/models/llama4.py, which its loader of adapters lacks.
        return (
            "vLLM reorders the rows of Llama 4's q_proj and k_proj when it loads the base, but not those of an "
            f"adapter: it would add {turned[0]} to the wrong rows"
        )
    if missing := _missing(modules, naming):
        return f"vLLM loads gate, up and down of every expert of a layer together, and {missing} has no adapter"
    return None


def _no_experts(naming: Naming) -> str | None:
    """Return why vLLM's loader would not find the experts of a family by the names of layers."""
    if naming.experts.stacked and not holds_stacks(naming):
        return (
            "the base's files hold the experts of a layer in one tensor (as Llama 4's and Qwen3.5-MoE's), and what "
            "vLLM calls each of them is known here for gpt-oss alone"
        )
    if naming.experts.idle:
        return "vLLM wraps no mixture that has experts without weights (LongCat Flash)"
    return None


def _missing(modules: Iterable[str], naming: Naming) -> str | None:
    """Return a projection of experts that is not adapted in a layer whose other projections are."""
    roles: dict[str, set[str]] = {}
    for module in modules:
        if expert := expert_of(module):
            role = ROLES.get(expert.name, expert.name)
            # Fused, they are one parameter, which holds zeros for the one that is not adapted.
            own = {GATE, UP} if holds_stacks(naming) and role != DOWN else {role}
            roles.setdefault(expert.container, set()).update(own)
    needed = {GATE, UP, DOWN} if naming.experts.gate else {UP, DOWN}
    return next((f"{c}.{role}" for c, present in sorted(roles.items()) for role in sorted(needed - present)), None)


def holds_stacks(naming: Naming) -> bool:
    """Return whether vLLM keeps the experts of a family fused, and reads PEFT's parameters: those of gpt-oss."""
    return naming.experts.interleaved


def vllm_config(spec: AdapterSpec, tensors: Tensors, base_model: str | None) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter with one rank, one scale and an integer alpha."""
    return peft_config(spec, modules_of(tensors), base_model)
