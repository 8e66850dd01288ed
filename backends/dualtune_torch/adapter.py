"""The trained numbers: float32 masters, their gradients and a copy in the compute dtype, each in one flat buffer.

With one buffer, the optimizer step, the gradient norm and the copy each run as one kernel instead of hundreds. Layers
that share an input have their A matrices side by side in it, so that one product computes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dualtune.adapter.dropout import input_of
from dualtune.adapter.methods import METHODS
from dualtune.adapter.spec import Tensors, tensor_name
from dualtune_torch.methods import AdaptedLayer


class AdapterBuffer:
    """Flat float32 tensors of one layout, and views of them by the names of the trained tensors, in this order."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = dict(shapes)
        total = sum(map(math.prod, self._shapes.values()))
        self.flat = torch.zeros(total, device=device, requires_grad=True)
        self.flat.grad = torch.zeros_like(self.flat)
        self.masters, self.grads = self._views(self.flat.detach()), self._views(self.flat.grad)
        self._compute = self.flat.detach() if dtype == torch.float32 else torch.empty_like(self.flat, dtype=dtype)
        self.compute = self._views(self._compute.detach())

    def refresh(self) -> None:
        """Update the copy in the compute dtype. Call this after every change of the flat tensor."""
        if self._compute.dtype != torch.float32:
            self._compute.copy_(self.flat.detach())

    def load(self, into: Tensor, state: Tensors) -> None:
        for name, view in self._views(into.detach()).items():
            view.copy_(torch.from_numpy(state[name]))

    def to_numpy(self, flat: Tensor) -> Tensors:
        views = self._views(flat.detach().cpu())
        return {name: views[name].numpy().copy() for name in sorted(views)}

    def empty(self) -> Tensors:
        """Return uninitialized arrays with the expected names and shapes, for checks."""
        return {name: np.empty(shape) for name, shape in self._shapes.items()}

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([*map(math.prod, self._shapes.values())])
        return {n: part.view(shape) for (n, shape), part in zip(self._shapes.items(), parts, strict=True)}


def adapter_buffer(
    layers: Mapping[str, AdaptedLayer], device: torch.device, dtype: torch.dtype, method: str = "lora"
) -> AdapterBuffer:
    """Make the weights and gradients of adapted layers (by module path) views of a new buffer."""
    together = sorted(layers, key=lambda path: (input_of(path), path))
    weights = {path: layer.trainable() for path, layer in layers.items()}
    named = {
        tensor_name(path, parameter.part, method): weights[path][parameter.part]
        for parameter in METHODS[method].parameters
        for path in together
    }
    buffer = AdapterBuffer({name: tuple(weight.shape) for name, weight in named.items()}, device, dtype)
    for name, weight in named.items():
        weight.data, weight.grad = buffer.masters[name], buffer.grads[name]
    return buffer
