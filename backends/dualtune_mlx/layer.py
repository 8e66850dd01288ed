"""LoRA in an MLX module of one's own: the layer behind `dualtune.engine.kernels.add_lora`.

    y = W x + b + s · B (A x)

The base is frozen; A and B are float32 parameters of the module, which `nn.value_and_grad` differentiates and any
optimizer of MLX updates. Hu et al., LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten

from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune_mlx.methods import linear_layers, linear_shape


class LoRALayer(nn.Module):
    """A frozen linear layer with LoRA, plain or quantized. x is [..., in], y [..., out].

    `name`, the layer's path in its model, and `seed` determine the start. Dropout draws from MLX's generator, in
    training mode.
    """

    def __init__(self, base: nn.Module, spec: AdapterSpec, name: str, seed: int = 0) -> None:
        super().__init__()
        start = spec.initial({name: linear_shape(base)}, seed)
        self.base = base.freeze()
        self.scale = spec.scale_of(name)
        self.dropout = nn.Dropout(spec.dropout)
        self.lora_A = mx.array(start[tensor_name(name, "A")])
        self.lora_B = mx.array(start[tensor_name(name, "B")])

    def __call__(self, x: mx.array) -> mx.array:
        y = self.base(x)
        u_Mr = self.scale * (self.dropout(x).flatten(0, -2) @ self.lora_A.T.astype(x.dtype))
        # One kernel for product and sum of all rows: else the gradient of B would be one product for each row.
        return mx.addmm(y.flatten(0, -2), u_Mr, self.lora_B.T.astype(x.dtype)).reshape(y.shape)

    def factors(self) -> dict[str, np.ndarray]:
        """Return copies of A [rank, in] and B [out, rank], float32."""
        return {part: np.array(self[f"lora_{part}"].astype(mx.float32)) for part in ("A", "B")}

    def load_factors(self, values: Mapping[str, np.ndarray]) -> None:
        self.lora_A, self.lora_B = mx.array(values["A"]), mx.array(values["B"])


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the linear layers of a module by path."""
    modules = dict(model.named_modules())
    return {path: linear_shape(modules[path]) for path in linear_layers(model) if path}


def add_layers(model: nn.Module, paths: Iterable[str], spec: AdapterSpec, seed: int) -> None:
    """Freeze the module and put LoRA on the linear layers at these paths."""
    model.freeze()
    modules = dict(model.named_modules())
    layers = [(path, LoRALayer(cast(nn.Module, modules[path]), spec, path, seed)) for path in paths]
    model.update_modules(tree_unflatten(layers))


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoRALayer)}
