"""A frozen layer in any storage format: plain, bitsandbytes' NF4, int8, or MLX's affine quantization.

All code that computes with a weight of the base model gets the numbers here. A packed weight is unpacked each time;
only the packed bytes are kept.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualtune_torch.weights import nf4
from dualtune_torch.weights.affine import AffineLayer, AffineLinear
from dualtune_torch.weights.int8 import Int8Linear
from dualtune_torch.weights.packed import PackedLayer

FrozenLinear = nn.Linear | AffineLinear | Int8Linear | Conv1D


def is_linear(module: nn.Module) -> TypeGuard[FrozenLinear]:
    """Return whether a module computes x Wᵀ + b. A subclass of nn.Linear may compute something else."""
    if isinstance(module, AffineLinear | Int8Linear | Conv1D) or nf4.is_nf4(module):
        return True
    return isinstance(module, nn.Linear) and (type(module).forward is nn.Linear.forward or _computes_product(module))


def _computes_product(module: nn.Linear) -> bool:
    x_2I = torch.linspace(-1, 1, 2 * module.in_features, device=module.weight.device, dtype=module.weight.dtype)
    x_2I = x_2I.view(2, -1)
    with torch.no_grad():
        expected_2O = F.linear(x_2I, module.weight, module.bias)
        try:
            result: Any = module(x_2I)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            return False  # of other inputs
    if not isinstance(result, Tensor) or result.shape != expected_2O.shape:
        return False
    return result.is_meta or torch.allclose(result, expected_2O, rtol=0.01, atol=0.01 * float(expected_2O.abs().max()))


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Return (out, in) of a linear layer, or of the matrix of a router."""
    if isinstance(layer, Conv1D):
        return layer.nf, layer.nx
    if isinstance(layer, nn.Linear | AffineLinear | Int8Linear):
        return layer.out_features, layer.in_features
    rows, columns = cast(Tensor, layer.weight).shape
    return rows, columns


def weight_of(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] of a linear layer, in the compute dtype of the model."""
    if isinstance(layer, PackedLayer):
        return layer.unpacked(dtype)
    if nf4.is_nf4(layer):
        return nf4.unpacked(layer, dtype)
    return as_stored(layer, cast(Tensor, layer.weight))


def as_stored(layer: nn.Module, weight: Tensor) -> Tensor:
    """Turn a matrix [out, in] to the orientation of the layer's weight, or back: GPT-2's Conv1D has [in, out]."""
    return weight.T if isinstance(layer, Conv1D) else weight


def is_four_bit(layer: nn.Module) -> bool:
    if isinstance(layer, PackedLayer):
        return layer.bits == 4
    return nf4.is_nf4(layer)


def stored_bytes(layer: nn.Module) -> int:
    """Return the bytes of the weight, including everything needed to unpack it."""
    tensors = layer.tensors if isinstance(layer, PackedLayer) else [layer.weight, *_scales(layer.weight)]
    return sum(tensor.nbytes for tensor in tensors)


def _scales(weight: Any) -> list[Tensor]:
    """Return what bitsandbytes stores besides the packed bytes: scales, the scales of these, and the table of each."""
    states = [state for state in [getattr(weight, "quant_state", None)] if state is not None]
    states += [state.state2 for state in states if state.state2 is not None]
    parts = [getattr(state, name) for state in states for name in ("absmax", "code", "offset")]
    return [tensor for tensor in parts if isinstance(tensor, Tensor)]


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the compute dtype. `model.dtype` is that of its first parameter, which may belong to an adapter."""
    embedding = model.get_input_embeddings()
    embedding = getattr(embedding, "base", embedding)  # of one with trained rows
    weight = embedding.scales if isinstance(embedding, AffineLayer) else embedding.weight
    return cast(Tensor, weight).dtype


def num_parameters(model: PreTrainedModel) -> int:
    """Count the parameters of the unquantized model. A matrix that is both embedding and output head counts once."""
    packed = {layer.weight.data_ptr(): layer for layer in model.modules() if isinstance(layer, PackedLayer)}
    of_packed = sum(rows * columns for rows, columns in (layer.shape for layer in packed.values()))
    return of_packed + sum(_num_weights(parameter) for parameter in model.parameters())


def _num_weights(parameter: Any) -> int:
    state = getattr(parameter, "quant_state", None)  # of bitsandbytes
    return parameter.numel() if state is None else math.prod(state.shape)
