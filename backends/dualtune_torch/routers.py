"""LoRA of the routers of a mixture on torch.

A router of transformers holds a plain matrix, multiplies by it itself and chooses experts by the product. An adapted
one does all of that with the sum of the matrix and its update, as PEFT's wrapper of a parameter does.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from dualtune.model.adapter import AdapterSpec
from dualtune.model.targets import is_router


class AdaptedWeight(Protocol):
    """An adapted layer whose weight [experts, hidden] with the adapter is a function of what is trained."""

    grouped: bool

    @property
    def base(self) -> nn.Module: ...
    @property
    def weight(self) -> Tensor: ...


class AdaptedRouter(nn.Module):
    """A router that computes with the weight of an adapted layer."""

    layer: AdaptedWeight

    def __init__(self, layer: AdaptedWeight, module: str, spec: AdapterSpec) -> None:
        """`module`: its canonical path. ConfigError for what has no form here."""
        super().__init__()
        spec.check_router(module)
        layer.grouped = False  # it is never called
        self.layer = layer

    def forward(self, *args: Any, **options: Any) -> Any:
        return functional_call(self.layer.base, {"weight": self.layer.weight}, args, options)


def routers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules with the name of a router and a matrix of their own by path. Some are linear layers."""
    return {path: module for path, module in model.named_modules() if is_router(path) and _has_matrix(module)}


def _has_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.is_floating_point()
