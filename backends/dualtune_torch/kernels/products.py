"""Products with a weight in float32 on a CPU, by oneDNN where that is faster than what torch takes.

torch takes MKL's product. On an AMD CPU oneDNN's takes less time for all but small products, most of all with the large
weight of an output head, whether for the rows of a training step or for the two to eight of a generated token
(`benchmarks/utilisation.py`, `benchmarks/generation.py`). It reads the weight as it lies, also transposed, and keeps
nothing of it. The sums are in another order, the same in each call: results differ from MKL's by the rounding of
float32.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualtune.engine.detect import is_amd

# Multiplications: oneDNN's product takes longer to start than a smaller one could save.
LEAST = 1 << 24
MOST_ROWS = 64  # of a product that generation computes


@cache
def is_faster() -> bool:
    """Return whether this machine has both libraries, and a CPU on which oneDNN's product is the faster one."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and is_amd()


def linear(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, [M, O], as F.linear does. oneDNN computes none that autograd would record."""
    return _product(x_MI, weight_OI, bias_O) if _pays(x_MI, weight_OI) else F.linear(x_MI, weight_OI, bias_O)


def times(g_MO: Tensor, weight_OI: Tensor) -> Tensor:
    """Return g W, [M, I]: what the backward pass of `linear` computes."""
    return _product(g_MO, weight_OI.T) if _pays(g_MO, weight_OI.T) else g_MO @ weight_OI


def base_output(layer: nn.Module, x_MI: Tensor) -> Tensor:
    """Return what a linear layer, in whatever form, makes of x; by its own `forward` if it was given one."""
    if type(layer) is nn.Linear and "forward" not in vars(layer):
        return linear(x_MI, layer.weight, layer.bias)
    return layer(x_MI)


def _pays(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * len(weight) >= LEAST
        and not torch.is_grad_enabled()
        and x.is_contiguous()  # oneDNN would copy it
        and (weight.is_contiguous() or weight.T.is_contiguous())
        and is_faster()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x Wᵀ + b by the operation that torch.compile makes of a linear layer."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# ----------------------------------------------------------------------------------------------------------------------
# Generation: most of a token's time is the reading of weights. Layers with fewer outputs than inputs gain nothing.


class ProductsOfFewRows:
    """The layers of a model that compute by oneDNN within `used`, also few rows."""

    def __init__(self, model: nn.Module) -> None:
        """Take the plain linear layers in float32 on a CPU; where oneDNN is not faster, none."""
        layers = model.modules() if is_faster() else ()
        self.layers = [layer for layer in layers if type(layer) is nn.Linear and _gains(layer)]
        self._places = [(vars(layer), partial(_of_few_rows, layer)) for layer in self.layers]

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


def _of_few_rows(layer: nn.Linear, x: Tensor) -> Tensor:
    if x.shape[:-1].numel() > MOST_ROWS or x.dtype != torch.float32:
        return linear(x, layer.weight, layer.bias)
    return _product(x, layer.weight, layer.bias)
