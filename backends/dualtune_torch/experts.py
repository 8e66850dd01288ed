"""LoRA of the experts of a mixture on torch.

Each projection of all experts of a layer has one adapter, whose products `dualtune_torch.mixture` adds.

Legend: S pairs of a token and one of its experts, sorted by expert, E experts, I input and O output features of a
projection, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import AdapterSpec
from dualtune.model.dropout import channel_keys, check_tokens
from dualtune.model.experts import DOWN, GATE, ROLES, UP, members
from dualtune.model.targets import is_expert
from dualtune_torch.lora import drop_rule, dropped
from dualtune_torch.methods import AdaptedLayer, DropoutSeeds
from dualtune_torch.mixture import DOWN_WEIGHT, GATE_UP, UP_WEIGHT, Projection, grouped, mixture
from dualtune_torch.weights.stacks import PackedStack

# By class: why its experts are not adapted.
OWN_CODE = {
    "DbrxExpertGLU": (
        "holds the matrices of all experts as the rows of one, in a module that computes nothing with PEFT's "
        "target_parameters around it, so that no other program could load the adapter"
    ),
    "JetMoeParallelExperts": (
        "sorts its tokens itself, and mixes queries and outputs of attention too, for which dualtune has no names"
    ),
}


class ExpertLoRA(AdaptedLayer):
    """scale · B (A x) of one projection of all experts, with A [E, r, I] and B [E, O, r] in float32."""

    keys_I: Tensor

    def __init__(self, projection: Projection, stack: str, spec: AdapterSpec, seeds: DropoutSeeds) -> None:
        super().__init__()
        self.projection, self.count = projection, projection.count
        device = getattr(projection.experts, projection.parameter).device
        (out_features, in_features), count = projection.shape, self.count
        self.scale, rank = spec.scale_of(first := members(stack, 1)[0]), spec.rank_of(first)
        self.dropout, self.dropout_seeds = spec.dropout, seeds
        self.lora_A = nn.Parameter(torch.empty(count, rank, in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(count, out_features, rank, device=device))
        keys = torch.from_numpy(channel_keys(stack, in_features).view("int32"))
        self.register_buffer("keys_I", keys.to(device), persistent=False)

    def forward(self, x_SI: Tensor, tokens_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return the change of the projection's output. `tokens`: the number of each row's token in the batch."""
        return self.update(self.after_dropout(x_SI, tokens_S), ends_E)

    def update(self, x_SI: Tensor, ends_E: Tensor) -> Tensor:
        """Return scale · B (A x)."""
        A_ErI, B_EOr = self.factors()
        u_Sr = grouped(x_SI, A_ErI.to(x_SI.dtype), ends_E)
        return grouped(self.scale * u_Sr, B_EOr.to(x_SI.dtype), ends_E)

    @property
    def drops(self) -> bool:
        """Whether the current micro-batch has dropout."""
        return self.dropout_seeds.seeds_BT is not None and self.dropout > 0

    def after_dropout(self, x_SI: Tensor, tokens_S: Tensor) -> Tensor:
        seeds_BT = self.dropout_seeds.seeds_BT
        if seeds_BT is None or not self.drops:
            return x_SI
        return dropped(x_SI, seeds_BT.flatten()[tokens_S], self.keys_I, *drop_rule(self.dropout))

    def merged(self, dtype: torch.dtype) -> Tensor | None:
        """Return the weights [E, out, in] to compute with in the place of the frozen ones; None: compute with these."""
        return None

    @property
    def base(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The module with the frozen weights, which is `AdaptedExperts`' to hold."""
        return self.projection.experts

    @property
    def shape(self) -> tuple[int, int]:
        return self.projection.shape

    def frozen(self, number: int | None, dtype: torch.dtype) -> Tensor:
        assert number is not None
        return self.projection.weight(number, dtype)

    @property
    def is_four_bit(self) -> bool:
        weight = getattr(self.base, self.projection.parameter)
        return isinstance(weight, PackedStack) and weight.is_four_bit

    def storage(self) -> tuple[int, int]:
        weight = getattr(self.base, self.projection.parameter)
        number = self.projection.count * math.prod(self.shape)
        if isinstance(weight, PackedStack):
            return number, weight.nbytes // (1 + self.projection.is_half)
        return number, number * weight.element_size()

    def trainable(self) -> dict[str, nn.Parameter]:
        return {"A": self.lora_A, "B": self.lora_B}

    def delta(self, number: int | None = None) -> Tensor:
        assert number is not None
        A_rI, B_Or = (factor[number].detach() for factor in self.factors())
        return (B_Or @ A_rI).mul_(self.scale)


class AdaptedExperts(nn.Module):
    """The experts of a layer, with adapters of some of their projections. Called as transformers' module is."""

    def __init__(self, base: nn.Module, adapters: Mapping[str, ExpertLoRA], seeds: DropoutSeeds) -> None:
        super().__init__()
        self.base: Any = base
        self.adapters = nn.ModuleDict(dict(adapters))  # by role
        self._seeds = seeds

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._seeds.seeds_BT is not None:
            check_tokens(len(hidden_states), self._seeds.seeds_BT.numel())
        return mixture(self.base, self.adapters, hidden_states, top_k_index, top_k_weights)


# --- finding and wrapping ---------------------------------------------------------------------------------------------


def expert_modules(model: PreTrainedModel, *, strict: bool = True) -> dict[str, nn.Module]:
    """Return the modules with stacked experts by path.

    One that is computed by code of its family's own is left out, or `strict`, a ConfigError.
    """
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, AdaptedExperts):
            modules[path] = cast(nn.Module, module.base)
            continue
        stacked = any(p.dim() == 3 for p in module.parameters(recurse=False))
        if not is_expert(path) or not (stacked or type(module).__name__ in OWN_CODE):
            continue
        if not has_common_code(path, module):
            if not strict:
                continue
            raise ConfigError(
                f"adapter.experts: got true, but {type(module).__name__} ({path}) "
                f"{OWN_CODE.get(type(module).__name__, 'computes its experts in a way of its own')}. Allowed: families "
                "whose experts have transformers' common code (use_experts_implementation), as Mixtral, Qwen2-MoE, "
                "Qwen3-MoE, OLMoE, DeepSeek-V2 and -V3, GLM-4-MoE and gpt-oss; Llama 4 and LongCat Flash. Set "
                "adapter.experts: false, which adapts the other linear layers of this model"
            )
        modules[path] = module
    return modules


def projections(model: PreTrainedModel, *, strict: bool = True) -> dict[str, Projection]:
    """Return the projections of all stacked experts by the path of their module and their role."""
    return {
        f"{path}.{role}": Projection(module, role)
        for path, module in expert_modules(model, strict=strict).items()
        for role in ((GATE, UP, DOWN) if module.has_gate else (UP, DOWN))
    }


def wrap(model: PreTrainedModel, adapters: Mapping[str, ExpertLoRA], seeds: DropoutSeeds) -> None:
    """Replace the modules of adapted projections, given by the paths of `projections`."""
    for path, module in expert_modules(model, strict=False).items():
        own = {role: adapters[key] for role in ROLES if (key := f"{path}.{role}") in adapters}
        if own:
            model.set_submodule(path, AdaptedExperts(module, own, seeds))


# --- packed -----------------------------------------------------------------------------------------------------------


def packed(experts: nn.Module, dtype: torch.dtype, make: Callable[[Tensor, None], nn.Module]) -> AdaptedExperts:
    """Return what computes with the packed matrices of a module with stacked experts, in the place of it.

    `make`: the packed layer of a matrix [out, in] in the stored precision. All else is cast.
    """
    module: Any = experts
    for name, parameter in list(experts.named_parameters(recurse=False)):
        if parameter.dim() == 3:
            delattr(module, name)  # one parameter after another is freed
            turned = parameter.data.transpose(1, 2) if module.is_transposed else parameter.data
            setattr(module, name, PackedStack(make(matrix.contiguous(), None) for matrix in turned))
        else:
            setattr(module, name, nn.Parameter(parameter.data.to(dtype), requires_grad=False))
    return AdaptedExperts(experts, {}, DropoutSeeds())


def has_common_code(path: str, module: nn.Module) -> bool:
    """Return whether a module holds stacked experts in the form that transformers' families share."""
    stacked = {name for name, p in module.named_parameters(recurse=False) if p.dim() == 3}
    weights = {GATE_UP, UP_WEIGHT, DOWN_WEIGHT}
    return bool(stacked) and stacked <= weights and hasattr(module, "has_post_expert_norm") and path.endswith("experts")
