"""The adapter's numbers: float32 masters, their gradients and a copy in the compute dtype, each in one flat buffer.

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
    """Flat float32 tensors of one layout, and views of them by the adapter's names."""

    def __init__(
        self, layers: Mapping[str, AdaptedLayer], device: torch.device, dtype: torch.dtype, method: str = "lora"
    ) -> None:
        """Make the weights and gradients of the layers (by module path) views of the buffer."""
        together = sorted(layers, key=lambda path: (input_of(path), path))
        weights = {path: layer.trainable() for path, layer in layers.items()}
        self._shapes = {
            tensor_name(path, parameter.part, method): tuple(weights[path][parameter.part].shape)
            for parameter in METHODS[method].parameters
            for path in together
        }
        self.sizes = [*map(math.prod, self._shapes.values())]
        self.flat = torch.zeros(sum(self.sizes), device=device, requires_grad=True)
        self.flat.grad = torch.zeros_like(self.flat)
        masters, self.grads = self._views(self.flat.detach()), self._views(self.flat.grad)
        for path, parts in weights.items():
            for part, weight in parts.items():
                name = tensor_name(path, part, method)
                weight.data, weight.grad = masters[name], self.grads[name]
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
        parts = flat.split(self.sizes)
        return {n: part.view(shape) for (n, shape), part in zip(self._shapes.items(), parts, strict=True)}
