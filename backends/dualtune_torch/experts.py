"""LoRA of the experts of a mixture on torch.

transformers 5 holds the experts of a layer in one module with stacked weights, whose code all families share
(`transformers.integrations.moe`): tokens are sorted by expert, and each group is multiplied by the weights of its own.
An adapted module does the same, with the products of its adapters added where each belongs: before the activation, and
to what leaves the expert. The cost follows the experts that are active, for the adapters as for the base.

Legend: T tokens, S pairs of a token and one of its experts, sorted by expert, E experts, I input and O output features
of a projection, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import AdapterSpec
from dualtune.model.dropout import channel_keys, check_tokens
from dualtune.model.experts import DOWN, GATE, ROLES, UP, members
from dualtune.model.targets import is_expert
from dualtune_torch.lora import drop_rule, dropped
from dualtune_torch.methods import AdaptedLayer, DropoutSeeds
from dualtune_torch.weights.stacks import PackedStack, by_group, groups

ALIGNMENT = 16  # bytes: torch's grouped product takes rows that begin there
GATE_UP, DOWN_WEIGHT, UP_WEIGHT = "gate_up_proj", "down_proj", "up_proj"  # the parameters of transformers' module
ROLES_OF = {GATE_UP: (GATE, UP), DOWN_WEIGHT: (DOWN,), UP_WEIGHT: (UP,)}


class Projection:
    """One projection of all experts of a module: where its frozen weights are."""

    def __init__(self, experts: nn.Module, role: str) -> None:
        self.experts: Any = experts
        self.role = role
        self.parameter = GATE_UP if experts.has_gate and role != DOWN else DOWN_WEIGHT if role == DOWN else UP_WEIGHT
        weight = cast("Tensor | PackedStack", getattr(experts, self.parameter))
        turned = experts.is_transposed and not isinstance(weight, PackedStack)
        rows, columns = weight.shape[1:] if not turned else (weight.shape[2], weight.shape[1])
        self.count = weight.shape[0]
        self.shape = (rows // 2 if self.is_half else rows, columns)  # (out, in) of each expert

    @property
    def is_half(self) -> bool:
        """Whether gate and up share the parameter."""
        return self.parameter == GATE_UP

    @property
    def rows(self) -> tuple[int, ...] | None:
        """The rows of the shared parameter [out, in] that are this projection's, as a slice; None: all of them."""
        if not self.is_half:
            return None
        out, second = self.shape[0], self.role == UP
        return (second * out, (second + 1) * out) if self.experts.is_concatenated else (int(second), 2 * out, 2)

    def weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return the frozen weight [out, in] of one expert."""
        stored = getattr(self.experts, self.parameter)
        if isinstance(stored, PackedStack):
            matrix = stored.matrix(number, dtype)
        else:
            matrix = stored[number].to(dtype).T if self.experts.is_transposed else stored[number].to(dtype)
        return matrix if self.rows is None else matrix[slice(*self.rows)]

    def weights(self) -> Tensor:
        """Return the frozen weights [E, out, in] of all experts. They are not packed."""
        stored = cast(Tensor, getattr(self.experts, self.parameter))
        matrices = stored.transpose(1, 2) if self.experts.is_transposed else stored
        return matrices if self.rows is None else matrices[:, slice(*self.rows)]


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
        base, each = self.base, top_k_index.shape[-1]
        if self._seeds.seeds_BT is not None:
            check_tokens(len(hidden_states), self._seeds.seeds_BT.numel())
        experts_S, order_S = top_k_index.flatten().sort(stable=True)
        numbers_E = torch.arange(base.down_proj.shape[0], device=experts_S.device)
        ends_E = torch.searchsorted(experts_S, numbers_E, right=True, out_int32=True)
        tokens_S = order_S // each
        x_SI = hidden_states[tokens_S]
        entered_S = self._projected(GATE_UP if base.has_gate else UP_WEIGHT, x_SI, experts_S, ends_E)
        entered_S = entered_S + self._change_within(x_SI, tokens_S, ends_E, entered_S)
        inner_S = base._apply_gate(entered_S) if base.has_gate else base.act_fn(entered_S)
        y_SO = self._projected(DOWN_WEIGHT, inner_S, experts_S, ends_E)
        if DOWN in self.adapters:
            y_SO = y_SO + self.adapters[DOWN](inner_S, tokens_S, ends_E)
        if base.has_post_expert_norm:
            y_SO = base.post_expert_norm(y_SO)
        weighted_SO = y_SO * top_k_weights.flatten()[order_S].unsqueeze(-1)
        # Back to the order of the tokens, and a sum whose order is fixed.
        places_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
        return weighted_SO[places_S].unflatten(0, (-1, each)).sum(1).to(hidden_states.dtype)

    def _projected(self, parameter: str, x_SI: Tensor, experts_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return the base's own product, with its bias; that of the merge where an adapter computes with it."""
        weight, roles = getattr(self.base, parameter), ROLES_OF[parameter]
        adapters = [cast("ExpertLoRA | None", getattr(self.adapters, role, None)) for role in roles]
        merges = [adapter.merged(x_SI.dtype) if adapter else None for adapter in adapters]
        if any(merge is not None for merge in merges):
            each = zip(roles, merges, strict=True)
            weights = [Projection(self.base, role).weights() if merge is None else merge for role, merge in each]
            y_SO = self._joined([grouped(x_SI, weight_EOI, ends_E) for weight_EOI in weights])
        elif isinstance(weight, PackedStack):
            y_SO = weight.product(x_SI, ends_E.tolist())
        else:
            y_SO = grouped(x_SI, weight.transpose(1, 2) if self.base.is_transposed else weight, ends_E)
        return y_SO + getattr(self.base, f"{parameter}_bias")[experts_S] if self.base.has_bias else y_SO

    def _change_within(self, x_SI: Tensor, tokens_S: Tensor, ends_E: Tensor, like: Tensor) -> Tensor | float:
        """Return the change of what enters the activation; 0 if neither gate nor up is adapted."""
        changes = {role: self.adapters[role](x_SI, tokens_S, ends_E) for role in (GATE, UP) if role in self.adapters}
        if not changes or not self.base.has_gate:
            return changes.get(UP, 0.0)
        half = like.shape[-1] // 2
        return self._joined([changes.get(role, like.new_zeros(len(like), half)) for role in (GATE, UP)])

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Return the output of a parameter from those of its projections."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, -1) if self.base.is_concatenated else torch.stack(parts, -1).flatten(-2)


# --- the products -----------------------------------------------------------------------------------------------------


def grouped(x_SI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row of x times the matrix of its expert. The rows are sorted by it; `ends`: where each one's end."""
    transposed = weights_EOI.transpose(1, 2)
    if x_SI.is_meta or (x_SI.is_cuda and _is_aligned(x_SI, weights_EOI)):
        return F.grouped_mm(x_SI, transposed, offs=ends_E)
    return _OneByOne.apply(x_SI, weights_EOI, ends_E.tolist())


def _is_aligned(x_SI: Tensor, weights_EOI: Tensor) -> bool:
    lengths = (x_SI.shape[-1], *weights_EOI.shape[1:])
    return all(length * x_SI.element_size() % ALIGNMENT == 0 for length in lengths)


class _OneByOne(torch.autograd.Function):
    """The products of the experts that have rows, one after another."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, weights_EOI: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x_SI, weights_EOI)
        ctx.ends = ends
        return by_group(x_SI, lambda number: weights_EOI[number].T, weights_EOI.shape[1], ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_SO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_SI, weights_EOI = ctx.saved_tensors
        dx_SI = dW_EOI = None
        if ctx.needs_input_grad[0]:
            dx_SI = by_group(g_SO, weights_EOI.__getitem__, weights_EOI.shape[2], ctx.ends)
        if ctx.needs_input_grad[1]:
            dW_EOI = torch.zeros_like(weights_EOI)
            for number, rows in groups(ctx.ends):
                torch.mm(g_SO[rows].T, x_SI[rows], out=dW_EOI[number])
        return dx_SI, dW_EOI, None


# --- finding and wrapping ---------------------------------------------------------------------------------------------


def expert_modules(model: PreTrainedModel, *, strict: bool = True) -> dict[str, nn.Module]:
    """Return the modules with stacked experts by path.

    One that is computed by code of its family's own is left out, or `strict`, a ConfigError.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, AdaptedExperts):
            found[path] = cast(nn.Module, module.base)
            continue
        if not is_expert(path) or not any(p.dim() == 3 for p in module.parameters(recurse=False)):
            continue
        if not has_common_code(path, module):
            if not strict:
                continue
            raise ConfigError(
                f"adapter.experts: got true, but {type(module).__name__} ({path}) computes its experts in a way of its "
                "own. Allowed: families whose experts have transformers' common code (use_experts_implementation), as "
                "Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and -V3, GLM-4-MoE and gpt-oss. Set "
                "adapter.experts: false"
            )
        found[path] = module
    return found


def projections(model: PreTrainedModel, *, strict: bool = True) -> dict[str, Projection]:
    """Return the projections of all stacked experts by the path of their module and their role."""
    return {
        f"{path}.{role}": Projection(module, role)
        for path, module in expert_modules(model, strict=strict).items()
        for role in ((GATE, UP, DOWN) if module.has_gate else (UP, DOWN))
    }


def wrap(model: PreTrainedModel, adapters: Mapping[str, ExpertLoRA], seeds: DropoutSeeds) -> None:
    """Replace the modules of adapted projections, given by the paths of `projections`."""
    for path, module in expert_modules(model).items():
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
    known = {GATE_UP, UP_WEIGHT, DOWN_WEIGHT}
    return bool(stacked) and stacked <= known and hasattr(module, "has_post_expert_norm") and path.endswith("experts")
