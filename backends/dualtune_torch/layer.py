"""LoRA in a torch module of one's own: the layer behind `dualtune.engine.kernels.add_lora`.

    y = W x + b + s · B (A x)

The base is frozen; A and B are float32 parameters, whose gradient `lora_backward` computes. Autograd keeps only the
layer's input. Gradients go through `.grad` as those of any parameter, so that every optimizer, clipping, accumulation
and DistributedDataParallel work as usual. Hu et al., LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune_torch.kernels.lora_backward import lora_backward
from dualtune_torch.weights.frozen import FrozenLinear, as_stored, is_linear, shape_of, weight_of


class LoRALayer(nn.Module):
    """A frozen linear layer with LoRA: nn.Linear, or one of bitsandbytes' in 4 bits. x is [..., in], y [..., out].

    `name`, the layer's path in its model, and `seed` determine the start. Dropout draws from torch's generator, in
    training mode. Under autocast the products are in the dtype of the base's output.
    """

    def __init__(self, base: FrozenLinear, spec: AdapterSpec, name: str, seed: int = 0) -> None:
        super().__init__()
        start = spec.initial({name: shape_of(base)}, seed)
        self.base = base.requires_grad_(False)
        self.scale, self.dropout = spec.scale_of(name), spec.dropout
        A_rI, B_Or = (torch.from_numpy(start[tensor_name(name, part)]) for part in ("A", "B"))
        self.lora_A = nn.Parameter(A_rI.to(base.weight.device))
        self.lora_B = nn.Parameter(B_Or.to(base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        x = F.dropout(x, self.dropout, self.training).to(y.dtype)
        return y + _Product.apply(x.flatten(0, -2), self.lora_A, self.lora_B, self.scale).view(y.shape)

    @property
    def weight(self) -> Tensor:
        """W + s · B A in the base's orientation, for modules that read it instead of calling the layer, as
        nn.MultiheadAttention does. ConfigError if that would leave out the dropout."""
        if self.dropout and self.training:
            raise ConfigError(
                f"add_lora: dropout: got {self.dropout}, but a module reads the weight of this layer instead of "
                "calling it, as nn.MultiheadAttention does. Set dropout 0, or leave the layer out of targets"
            )
        dtype = self.base.weight.dtype if self.base.weight.is_floating_point() else self.lora_A.dtype
        return as_stored(self.base, weight_of(self.base, dtype) + (self.scale * self.lora_B @ self.lora_A).to(dtype))

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def factors(self) -> dict[str, np.ndarray]:
        """Return copies of A [rank, in] and B [out, rank], float32."""
        return {part: np.array(p.detach().float().cpu()) for part, p in (("A", self.lora_A), ("B", self.lora_B))}

    def load_factors(self, values: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            self.lora_A.copy_(torch.from_numpy(values["A"]))
            self.lora_B.copy_(torch.from_numpy(values["B"]))


class _Product(torch.autograd.Function):
    """s · (x Aᵀ) Bᵀ in the dtype of x [M, I]; keeps x, A and B."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, A_rI: Tensor, B_Or: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x_MI, A_rI, B_Or)
        ctx.scale = scale
        return scale * F.linear(F.linear(x_MI, A_rI.to(x_MI.dtype)), B_Or.to(x_MI.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_MI, A_rI, B_Or = ctx.saved_tensors
        needs_dx = ctx.needs_input_grad[0]
        dA_rI, dB_Or, *dx_MI = lora_backward(g_MO, x_MI, A_rI, B_Or, ctx.scale, need_grad_x=needs_dx)
        return dx_MI[0] if needs_dx else None, dA_rI, dB_Or, None


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the linear layers of a module by path."""
    return {path: shape_of(layer) for path, layer in model.named_modules() if path and is_linear(layer)}


def add_layers(model: nn.Module, paths: Iterable[str], spec: AdapterSpec, seed: int) -> None:
    """Freeze the module and put LoRA on the linear layers at these paths."""
    model.requires_grad_(False)
    for path in paths:
        base: Any = model.get_submodule(path)
        model.set_submodule(path, LoRALayer(base, spec, path, seed))


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoRALayer)}
