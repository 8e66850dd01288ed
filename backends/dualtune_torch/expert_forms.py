"""Experts that transformers computes by code of a family's own, in the form that the others share.

What `use_experts_implementation` tells of a module stands here as attributes of a class that comes before transformers'
own. That one is known by its name, so that no family is imported for the sake of another. The numbers are the same; the
cost becomes that of the experts that a token is sent to.

- Llama 4 sends every token to all experts, times 0 where it was not chosen: an expert without a bias makes 0 of 0. What
  is chosen is weighed before it enters the expert.
- LongCat Flash has experts without weights, which pass their token on. Its stack of gate and up has matrices for them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn

from dualtune_torch.mixture import mixture

Model = TypeVar("Model", bound=nn.Module)
NO_ADAPTERS = nn.ModuleDict()


class CommonForm:
    """What transformers' shared code asks of a module: gate and up in one parameter, as halves, without a bias."""

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_concatenated, is_transposed = True, False
    weighs_inputs = False  # whether the weight of an expert is a factor of its input, instead of its output
    passes_on = False  # whether the numbers after the last expert stand for experts that return their input
    act_fn: Any

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mixture(self, NO_ADAPTERS, hidden_states, top_k_index, top_k_weights)

    def _apply_gate(self, both_S: Tensor) -> Tensor:
        gate_S, up_S = both_S.chunk(2, dim=-1)
        return self.act_fn(gate_S) * up_S


class Llama4Experts(CommonForm):
    is_transposed, weighs_inputs = True, True


class Llama4Mixture:
    hidden_dim: int
    top_k: int
    router: Any
    experts: Any
    shared_expert: Any

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x_TI = hidden_states.reshape(-1, self.hidden_dim)
        scores_TE, logits_TE = self.router(x_TI)
        chosen_Tk = logits_TE.topk(self.top_k, dim=-1).indices
        y_TI = self.experts(x_TI, chosen_Tk, scores_TE.gather(-1, chosen_Tk))
        return self.shared_expert(x_TI) + y_TI, logits_TE


class LongcatExperts(CommonForm):
    passes_on = True


FORMS: dict[str, type[Any]] = {
    "Llama4TextExperts": Llama4Experts,
    "Llama4TextMoe": Llama4Mixture,
    "LongcatFlashExperts": LongcatExperts,
}


def with_common_forms(model: Model) -> Model:
    """Return the model with experts in the common form. Names and parameters stay."""
    for module in model.modules():
        if type(module).__name__ in FORMS:
            module.__class__ = _in_common_form(type(module))
    return model


@cache
def _in_common_form(kind: type[nn.Module]) -> type[nn.Module]:
    form = FORMS[kind.__name__]
    return type(form.__name__, (form, kind), {})
