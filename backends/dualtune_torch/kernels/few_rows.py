"""Products of few rows on a CPU by oneDNN: what generation computes at each token is mostly the reading of weights.

torch takes MKL's product, which on an AMD CPU reads a large weight, such as an output head, slower than oneDNN's does,
most of all for two to eight rows (`benchmarks/generation.py`). Layers with fewer outputs than inputs gain nothing. The
sums are in another order, so they differ by the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_ROWS = 64


class ProductsOfFewRows:
    """The layers of a model that compute so within `used`."""

    def __init__(self, model: nn.Module) -> None:
        """Take the plain linear layers in float32 on a CPU that both libraries serve; without one, none."""
        op = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what torch.compile makes of a linear layer
        has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
        layers = model.modules() if op is not None and has_both else ()
        self.layers = [layer for layer in layers if type(layer) is nn.Linear and _gains(layer)]
        self._places = [(vars(layer), partial(_product, op, layer)) for layer in self.layers]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute so inside the block, without a gradient."""
        try:
            for attributes, product in self._places:
                attributes["forward"] = product
            yield
        finally:
            for attributes, _ in self._places:
                attributes.pop("forward", None)


def _gains(layer: nn.Linear) -> bool:
    weight = layer.weight
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    return is_plain and layer.out_features > layer.in_features


def _product(op: Any, layer: nn.Linear, x: Tensor) -> Tensor:
    if x.shape[:-1].numel() > MOST_ROWS or x.dtype != torch.float32:
        return F.linear(x, layer.weight, layer.bias)
    return op(x, layer.weight, layer.bias, "none", [], "")
