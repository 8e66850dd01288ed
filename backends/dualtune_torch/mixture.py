"""What a mixture computes: each token by its own experts, with the change of their adapters where there are any.

transformers 5 holds the experts of a layer in one module with stacked weights, whose code all families share
(`transformers.integrations.moe`): tokens are sorted by expert, and each group is multiplied by the weights of its own.
So it is here; the products of adapters are added where each belongs: before the activation, and to what leaves the
expert. The cost follows the experts that are active, for the adapters as for the base.

Legend: T tokens, S pairs of a token and one of its experts, sorted by expert, E experts, I input and O output features
of a projection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualtune.model.experts import DOWN, GATE, UP
from dualtune_torch.kernels.products import write_product
from dualtune_torch.weights.stacks import PackedStack, by_group, groups

ALIGNMENT = 16  # bytes: torch's grouped product takes rows that begin there
GATE_UP, DOWN_WEIGHT, UP_WEIGHT = "gate_up_proj", "down_proj", "up_proj"  # the parameters of transformers' module
ROLES_OF = {GATE_UP: (GATE, UP), DOWN_WEIGHT: (DOWN,), UP_WEIGHT: (UP,)}


class ProjectionAdapter(Protocol):
    """The adapter of one projection of all experts."""

    def __call__(self, x_SI: Tensor, tokens_S: Tensor, ends_E: Tensor) -> Tensor: ...

    def merged(self, dtype: torch.dtype) -> Tensor | None: ...


class Projection:
    """One projection of all experts of a module: where its frozen weights are."""

    def __init__(self, experts: nn.Module, role: str) -> None:
        self.experts: Any = experts
        self.role = role
        self.parameter = GATE_UP if experts.has_gate and role != DOWN else DOWN_WEIGHT if role == DOWN else UP_WEIGHT
        weight = cast("Tensor | PackedStack", getattr(experts, self.parameter))
        turned = experts.is_transposed and not isinstance(weight, PackedStack)
        rows, columns = weight.shape[1:] if not turned else (weight.shape[2], weight.shape[1])
        self.count = num_experts(experts)
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
        stored = cast(Tensor, getattr(self.experts, self.parameter))[: self.count]
        matrices = stored.transpose(1, 2) if self.experts.is_transposed else stored
        return matrices if self.rows is None else matrices[:, slice(*self.rows)]


def mixture(base: Any, adapters: nn.ModuleDict, x_TI: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """Return what a module of stacked experts computes with adapters, by role, of some of its projections.

    A number from that of all experts on passes its token on as it is (`dualtune_torch.expert_forms`).
    """
    return _Mixture(base, adapters)(x_TI, chosen_Tk, weights_Tk)


class _Mixture:
    def __init__(self, base: Any, adapters: nn.ModuleDict) -> None:
        self.base, self.adapters, self.count = base, adapters, num_experts(base)

    def __call__(self, x_TI: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        base, each = self.base, chosen_Tk.shape[-1]
        experts_S, order_S = chosen_Tk.flatten().sort(stable=True)
        numbers_E = torch.arange(self.count, device=experts_S.device)
        ends_E = torch.searchsorted(experts_S, numbers_E, right=True, out_int32=True)
        tokens_S, weights_S1 = order_S // each, weights_Tk.flatten()[order_S].unsqueeze(-1)
        x_SI = x_TI[tokens_S]
        if getattr(base, "weighs_inputs", False):
            x_SI, weights_S1 = x_SI * weights_S1, None
        y_SO = self._passing_on(x_SI, experts_S, partial(self._outputs, tokens_S, experts_S, ends_E))
        if weights_S1 is not None:
            y_SO = y_SO * weights_S1
        # Back to the order of the tokens, and a sum whose order is fixed.
        places_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
        return y_SO[places_S].unflatten(0, (-1, each)).sum(1).to(x_TI.dtype)

    def _passing_on(self, x_SI: Tensor, experts_S: Tensor, outputs: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs, and where there is no expert of that number the input."""
        if not getattr(self.base, "passes_on", False):
            return outputs(x_SI)
        # Products leave rows behind the last expert's as they find them, which must not reach outputs or gradients.
        is_passed_S1 = (experts_S >= self.count).unsqueeze(-1)
        return torch.where(is_passed_S1, x_SI, outputs(torch.where(is_passed_S1, 0.0, x_SI)))

    def _outputs(self, tokens_S: Tensor, experts_S: Tensor, ends_E: Tensor, x_SI: Tensor) -> Tensor:
        """Return what leaves the expert of each row."""
        base = self.base
        entered_S = self._projected(GATE_UP if base.has_gate else UP_WEIGHT, x_SI, experts_S, ends_E)
        entered_S = entered_S + self._change_within(x_SI, tokens_S, ends_E, entered_S)
        inner_S = base._apply_gate(entered_S) if base.has_gate else base.act_fn(entered_S)
        y_SO = self._projected(DOWN_WEIGHT, inner_S, experts_S, ends_E)
        if DOWN in self.adapters:
            y_SO = y_SO + self.adapters[DOWN](inner_S, tokens_S, ends_E)
        return base.post_expert_norm(y_SO) if base.has_post_expert_norm else y_SO

    def _projected(self, parameter: str, x_SI: Tensor, experts_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return the base's own product, with its bias; that of the merge where an adapter computes with it."""
        weight, roles = getattr(self.base, parameter), ROLES_OF[parameter]
        adapters = [cast("ProjectionAdapter | None", getattr(self.adapters, role, None)) for role in roles]
        merges = [adapter.merged(x_SI.dtype) if adapter else None for adapter in adapters]
        if any(merge is not None for merge in merges):
            each = zip(roles, merges, strict=True)
            weights = [Projection(self.base, role).weights() if merge is None else merge for role, merge in each]
            y_SO = self._joined([grouped(x_SI, weight_EOI, ends_E) for weight_EOI in weights])
        elif isinstance(weight, PackedStack):
            y_SO = weight.product(x_SI, ends_E.tolist())
        else:
            weight = weight[: self.count]
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
                write_product(dW_EOI[number], g_SO[rows].T, x_SI[rows])
        return dx_SI, dW_EOI, None


def num_experts(experts: Any) -> int:
    """Return how many experts a module of stacked experts has. A stack may hold more matrices, which nobody uses."""
    return int(experts.down_proj.shape[0])
