"""Products of matrices on a CPU, by the library that is the faster one there. On a GPU they are torch's.

In float32 torch takes MKL's product. On an AMD CPU oneDNN's takes less time for all but small products, most of all
with the large weight of an output head, whether for the rows of a training step or for the two to eight of a generated
token (`benchmarks/utilisation.py`, `benchmarks/generation.py`). Without AVX-512 this holds for a token, but of a
training step's products only for that of the output head. It reads the weight as it lies, also transposed, and keeps
nothing of it. The sums are in another order, the same in each call: results differ from MKL's by the rounding of
float32.

In 16 bits oneDNN needs instructions that many CPUs lack (bfloat16: AVX-512). Without it, torch's own product takes many
times as long as one in float32, so both factors are widened to float32, the weight by blocks, and the result is rounded
once.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualtune.engine.detect import is_amd

# Multiplications: oneDNN's product takes longer to start than a smaller one could save.
LEAST = 1 << 24
LEAST_OUTPUTS = 1 << 14  # of a training step's product without AVX-512
MOST_ROWS = 64  # of a product that generation computes
WIDENED_AT_ONCE = 1 << 22  # numbers of a weight in 16 bits that are float32 at a time
UNWIDENED_ROWS = 4  # in 16 bits: torch reads a weight once for so few, which takes less time than widening it
SUPPORT = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@cache
def is_faster() -> bool:
    """Return whether this machine has both libraries, and a CPU on which oneDNN's product is the faster one."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and is_amd()


@cache
def has_avx512() -> bool:
    """Return whether torch computes with AVX-512 here."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def is_native(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of 16 bits on this CPU."""
    supports = getattr(torch.ops.mkldnn, SUPPORT[dtype], None)
    return torch.backends.mkldnn.is_available() and supports is not None and supports()


def is_widened(x: Tensor) -> bool:
    """Return whether products with x are computed in float32 and rounded."""
    return x.device.type == "cpu" and x.dtype in SUPPORT and not is_native(x.dtype)


def linear(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, [M, O], as F.linear does. oneDNN computes none that autograd would record."""
    if is_widened(x_MI) and (torch.is_grad_enabled() or x_MI.shape[:-1].numel() > UNWIDENED_ROWS):
        return _WidenedLinear.apply(x_MI, weight_OI, bias_O)
    return _product(x_MI, weight_OI, bias_O) if _pays(x_MI, weight_OI) else F.linear(x_MI, weight_OI, bias_O)


def times(g_MO: Tensor, weight_OI: Tensor) -> Tensor:
    """Return g W, [M, I]: what the backward pass of `linear` computes."""
    return _product(g_MO, weight_OI.T) if _pays(g_MO, weight_OI.T) else product(g_MO, weight_OI)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, for matrices or batches of them."""
    return _widened(a, b).to(a.dtype) if is_widened(a) else a @ b


def write_product(out_MI: Tensor, a_MO: Tensor, b_OI: Tensor, factor: float = 1.0) -> None:
    """out = factor · a b, rounded once."""
    if is_widened(a_MO):
        out_MI.copy_(_widened(a_MO, b_OI).mul_(factor))
    elif factor == 1:
        torch.mm(a_MO, b_OI, out=out_MI)
    else:
        out_MI.addmm_(a_MO, b_OI, beta=0, alpha=factor)


def add_product(total_MI: Tensor, a_MO: Tensor, b_OI: Tensor, factor: float = 1.0) -> Tensor:
    """total += factor · a b, and return it. In a total of float32 on a GPU, one kernel rounds the sum once.

    On a CPU, products of 16-bit numbers may be rounded to 16 bits before they are added.
    """
    if is_widened(a_MO):
        return total_MI.add_(_widened(a_MO, b_OI), alpha=factor)
    if a_MO.dtype == total_MI.dtype:
        return total_MI.addmm_(a_MO, b_OI, alpha=factor)
    if total_MI.is_cuda:
        return torch.addmm(total_MI, a_MO, b_OI, out_dtype=total_MI.dtype, alpha=factor, out=total_MI)
    return total_MI.add_(a_MO @ b_OI, alpha=factor)


def base_output(layer: nn.Module, x_MI: Tensor) -> Tensor:
    """Return what a linear layer, in whatever form, makes of x; by its own `forward` if it was given one."""
    if type(layer) is nn.Linear and "forward" not in vars(layer):
        return linear(x_MI, layer.weight, layer.bias)
    return layer(x_MI)


def _widened(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32, a block of b's rows after the other."""
    if b.dim() > 2 or b.numel() <= WIDENED_AT_ONCE:
        return a.float() @ b.float()
    total_MI = a.new_zeros(len(a), b.shape[1], dtype=torch.float32)
    for rows in _blocks(b):
        total_MI.addmm_(a[:, rows].float(), b[rows].float())
    return total_MI


def _blocks(weight: Tensor) -> Iterator[slice]:
    """Yield the rows of a weight, as many at a time as may be float32."""
    rows = max(1, WIDENED_AT_ONCE // weight.shape[1])
    return (slice(begin, begin + rows) for begin in range(0, len(weight), rows))


class _WidenedLinear(torch.autograd.Function):
    """x Wᵀ + b for x [..., I] in 16 bits. The backward pass keeps W, and x if W is trained: nothing in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_OI)
        x_MI = x.reshape(-1, x.shape[-1]).float()
        y_MO = x.new_empty(len(x_MI), len(weight_OI))
        for rows in _blocks(weight_OI):
            y_MO[:, rows] = F.linear(x_MI, weight_OI[rows].float(), None if bias_O is None else bias_O[rows].float())
        return y_MO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, weight_OI), g_MO = ctx.saved_tensors, g.reshape(-1, g.shape[-1])
        needs_dx, needs_dW, needs_db = ctx.needs_input_grad
        return (
            times(g_MO, weight_OI).view(*g.shape[:-1], -1) if needs_dx else None,
            _gradient(g_MO, x.reshape(-1, x.shape[-1]), weight_OI) if needs_dW else None,
            g_MO.sum(0) if needs_db else None,
        )


def _gradient(g_MO: Tensor, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return gᵀ x in 16 bits, as many rows at a time in float32 as of the weight."""
    dW_OI, wide_MI = torch.empty_like(weight_OI), x_MI.float()
    for rows in _blocks(weight_OI):
        dW_OI[rows] = g_MO[:, rows].T.float() @ wide_MI
    return dW_OI


def widen_layers(model: nn.Module) -> None:
    """Let the plain linear layers of a model, adapted or not, compute as `linear` does, if it widens."""
    for layer in model.modules():
        if type(layer) is nn.Linear and is_widened(layer.weight):
            vars(layer)["forward"] = partial(_output, layer)


def _output(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _pays(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * len(weight) >= LEAST
        and not torch.is_grad_enabled()
        and x.is_contiguous()  # oneDNN would copy it
        and (weight.is_contiguous() or weight.T.is_contiguous())
        and is_faster()
        and (has_avx512() or len(weight) >= LEAST_OUTPUTS)
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
