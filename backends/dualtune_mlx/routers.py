"""LoRA of the routers of a mixture on MLX.

Most routers of mlx-lm are linear layers, which are adapted as any other. Where choosing experts takes more (DeepSeek's
`MoEGate`), a class of its own holds the matrix and multiplies by it itself: an adapted one computes with the sum of the
matrix and its update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from dualtune.model.adapter import AdapterSpec
from dualtune.model.targets import is_router
from dualtune_mlx.adapter_inputs import Origins
from dualtune_mlx.lora import Factors
from dualtune_mlx.methods import LINEAR, AdaptedLayer


class AdaptedRouter(AdaptedLayer):
    """A router that computes with W + scale · B A [experts, hidden], with A and B in float32."""

    def __init__(self, base: nn.Module, module: str, spec: AdapterSpec) -> None:
        """`module`: its canonical path. ConfigError for what has no form here."""
        super().__init__()
        spec.check_router(module)
        self.base = base
        self.weights = Factors(spec.width_of(module), spec.scale_of(module))

    def __call__(self, *args: Any, **options: Any) -> Any:
        frozen = self.base["weight"]
        try:
            self.base["weight"] = self.weight
            return cast(Any, self.base)(*args, **options)
        finally:
            self.base["weight"] = frozen

    @property
    def weight(self) -> mx.array:
        """W + scale · B A. A mixture may multiply by it instead of calling its router."""
        frozen = cast(mx.array, self.base["weight"])
        return frozen + self.delta().astype(frozen.dtype)

    def __getattr__(self, key: str) -> Any:
        """What else a mixture reads of its router."""
        return getattr(self["base"], key) if "base" in self and key in self["base"] else super().__getattr__(key)

    def bind(self, values: Mapping[str, mx.array]) -> None:
        self.weights.lora_A_rI, self.weights.lora_B_Or = values["A"], values["B"]

    def trace(self, origins: Origins) -> None:
        """A sum of weights keeps no input."""

    def forget(self) -> None:
        """Routers keep nothing for each other."""

    def delta(self, number: int | None = None) -> mx.array:
        return self.weights.scale * (self.weights.lora_B_Or @ self.weights.lora_A_rI)


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with the name of a router and a matrix of their own by path, but no linear layers."""
    return {path: module for path, module in model.named_modules() if is_own_router(path, module)}


def is_own_router(path: str, module: nn.Module) -> bool:
    """Return whether a module is a router with a matrix of its own."""
    weight = module.get("weight")
    has_matrix = isinstance(weight, mx.array) and weight.ndim == 2 and mx.issubdtype(weight.dtype, mx.floating)
    return has_matrix and is_router(path) and not isinstance(module, LINEAR)
