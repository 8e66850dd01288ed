"""bitsandbytes' NF4 on torch: linear layers quantized one after another, to the bits that transformers gives them.

4-bit codes with a scale for each block of 64 weights, and 8-bit codes of these scales, in blocks of 256, with a scale
each (Dettmers et al., QLoRA, arXiv 2305.14314, section 3: NormalFloat and double quantization).

Legend: O output and I input features of a weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from logging import getLogger
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig
from transformers.utils import logging

from dualtune.model.config_file import read_config, stored_precision
from dualtune.model.copies import copy_without_weights
from dualtune_torch.weights.packed import WEIGHTS_AT_ONCE, product
from dualtune_torch.weights.text_part import whole_class

BLOCK_SIZE, SCALES_BLOCK_SIZE = 64, 256
# On some CPUs it warns when it is imported that a faster kernel, which no one has asked for, is not installed.
getLogger("bitsandbytes.backends.cpu.ops").setLevel("ERROR")


def linear(weight_OI: Tensor, bias: nn.Parameter | None, dtype: torch.dtype) -> nn.Module:
    """Return bitsandbytes' layer for a weight in its stored precision."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    out_features, in_features = weight_OI.shape
    layer: Any = Linear4bit(in_features, out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta")
    codes, state = quantize(weight_OI, dtype)
    make: Any = Params4bit  # it takes more arguments than a Parameter
    layer.weight = make(codes, quant_type="nf4", quant_state=state, bnb_quantized=True, module=layer)
    layer.quant_state, layer.bias = state, bias
    return layer


def quantize(weight_OI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Return the codes, uint8 [O · I / 2, 1], and bitsandbytes' QuantState of a matrix that is cast to `dtype` first.

    This is `bitsandbytes.functional.quantize_4bit` with compress_statistics. On a CPU that function takes five times
    the memory of its input, so it gets a few rows at a time; 64 rows hold whole blocks.
    """
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    rows = BLOCK_SIZE * max(1, WEIGHTS_AT_ONCE // (BLOCK_SIZE * weight_OI.shape[1]))
    parts = [quantize_4bit(part.to(dtype).contiguous(), quant_type="nf4") for part in weight_OI.split(rows)]
    codes = torch.cat([codes for codes, _ in parts])
    scales = torch.cat([state.absmax for _, state in parts])
    offset = scales.mean()
    packed_scales, state2 = quantize_blockwise(scales - offset, blocksize=SCALES_BLOCK_SIZE)
    return codes, QuantState(
        packed_scales, shape=weight_OI.shape, code=parts[0][1].code, blocksize=BLOCK_SIZE, quant_type="nf4",
        dtype=dtype, offset=offset, state2=state2,
    )  # fmt: skip


def is_nf4(module: nn.Module) -> bool:
    """Return whether a module is bitsandbytes' linear layer with packed weights."""
    return getattr(module._parameters.get("weight"), "quant_state", None) is not None


def unpacked(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] of an NF4 layer, by bitsandbytes or as `unpack_by` says."""
    weight: Any = layer.weight
    return layer.__dict__.get("unpack", unpack)(weight.data, weight.quant_state).to(dtype)


def unpack(codes: Tensor, state: Any) -> Tensor:
    """Return the matrix of these codes by bitsandbytes.

    Its code for CPUs (0.50.2) takes the scales of other blocks if a row is not made of whole blocks, silently. It gets
    the blocks as rows then.
    """
    from bitsandbytes.functional import dequantize_4bit

    if not _splits_blocks(codes, state):
        return dequantize_4bit(codes, state)
    num_weights, by_block = state.shape.numel(), copy.copy(state)
    is_whole = num_weights % state.blocksize == 0
    by_block.shape = torch.Size((num_weights // state.blocksize, state.blocksize) if is_whole else (num_weights,))
    return dequantize_4bit(codes, by_block).view(state.shape)


def _splits_blocks(codes: Tensor, state: Any) -> bool:
    return codes.device.type == "cpu" and state.shape[-1] % state.blocksize != 0


def unpack_by(layer: nn.Module, by: Callable[[Tensor, Any], Tensor]) -> None:
    """Let a layer unpack its weight by a function of codes and QuantState, in the forward and the backward pass."""
    changed: Any = layer
    changed.unpack, changed.unpacked = by, MethodType(unpacked, layer)
    changed.forward = MethodType(_forward, layer)


def _forward(self: Any, x: Tensor) -> Tensor:
    is_one_token = x.numel() == x.shape[-1]  # bitsandbytes multiplies by the packed weight, which reads a ninth
    if is_one_token and not _splits_blocks(self.weight, self.weight.quant_state):
        return type(self).forward(self, x)
    return product(x, self)


def config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the same format as an option of transformers' loader."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def keep_differentiable(model: nn.Module, dtype: torch.dtype) -> None:
    """Set up all NF4 layers of a model, however they were loaded, for training in a compute dtype.

    In eval mode bitsandbytes repacks the weights of a Linear4bit for its CPU inference kernel, which has no backward
    pass: gradients through the layer would silently vanish. And the compute dtype in the config of a stored model would
    override ours. Layers that bitsandbytes unpacks wrongly compute by `unpack`.
    """
    for module in cast(Iterator[Any], model.modules()):
        if type(module).__name__ == "Linear4bit":
            module.train()
            module.compute_dtype, module.compute_type_is_set = dtype, True
            if _splits_blocks(module.weight, module.weight.quant_state):
                unpack_by(module, unpack)


def write_model(source: Path, out: Path, device: torch.device) -> None:
    """Write a plain model directory in NF4, as transformers does it, in the precision of its files."""
    dtype: torch.dtype = getattr(torch, stored_precision(read_config(source)) or "float32")
    logging.disable_progress_bar()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    make: Any = whole_class(AutoConfig.from_pretrained(source, **options))
    model = make.from_pretrained(
        source, quantization_config=config(dtype), dtype=dtype, device_map={"": device}, use_safetensors=True,
        **options,
    )  # fmt: skip
    copy_without_weights(source, out)
    model.save_pretrained(out)
