"""A frozen layer, however its weight lies in memory: plain, in bitsandbytes' NF4, or in MLX's affine quantization.

Whatever computes with a weight of the base model asks here for the numbers, which a packed one is unpacked to each
time: kept are the packed bytes alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualtune_torch.weights.affine import AffineLayer, AffineLinear, dequantize

FrozenLinear = nn.Linear | AffineLinear | Conv1D


def shape_of(layer: FrozenLinear) -> tuple[int, int]:
    """(out, in) of a linear layer."""
    if isinstance(layer, Conv1D):
        return layer.nf, layer.nx
    return layer.out_features, layer.in_features


def weight_of(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a linear layer, in the dtype that the model computes in."""
    if isinstance(layer, AffineLayer):
        return dequantize(layer.packed)  # its scales have that dtype
    weight: Any = layer.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        return as_stored(layer, weight)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).to(dtype)


def as_stored(layer: nn.Module, weight: Tensor) -> Tensor:
    """A matrix [out, in] in the orientation of the layer's own weight, and back: Conv1D, the linear layer of GPT-2, has
    [in, out]."""
    return weight.T if isinstance(layer, Conv1D) else weight


def is_four_bit(layer: nn.Module) -> bool:
    if isinstance(layer, AffineLayer):
        return layer.packed.bits == 4
    return getattr(layer.weight, "quant_state", None) is not None


def stored_bytes(layer: nn.Module) -> int:
    """Of the weight, with all that it takes to unpack it."""
    tensors = [*layer.packed] if isinstance(layer, AffineLayer) else [layer.weight, *_scales(layer.weight)]
    return sum(tensor.nbytes for tensor in tensors)


def _scales(weight: Any) -> list[Tensor]:
    """What bitsandbytes keeps beside the packed bytes: scales, their own scales, and the table of each."""
    states = [state for state in [getattr(weight, "quant_state", None)] if state is not None]
    states += [state.state2 for state in states if state.state2 is not None]
    found = [getattr(state, name) for state in states for name in ("absmax", "code", "offset")]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """What the model computes in. `model.dtype` is that of its first parameter, which may be one of an adapter."""
    embedding = model.get_input_embeddings()
    weight = embedding.scales if isinstance(embedding, AffineLayer) else embedding.weight
    return cast(Tensor, weight).dtype


def num_parameters(model: PreTrainedModel) -> int:
    """Of the model before it was quantized; a matrix that is embedding and output head counts once."""
    packed = {layer.weight.data_ptr(): layer for layer in model.modules() if isinstance(layer, AffineLayer)}
    return model.num_parameters() + sum(rows * columns for rows, columns in (x.shape for x in packed.values()))
