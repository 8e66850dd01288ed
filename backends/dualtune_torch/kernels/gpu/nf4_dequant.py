"""bitsandbytes' NF4 with double quantization, unpacked in one launch: codes, scales, and the scales of the scales.

Bytes: reads half a byte a weight and 1/64 byte for its scale, writes the weight once. bitsandbytes unpacks the scales
first (a kernel, and an addition), and each launch costs microseconds that a small matrix does not take.

Dettmers et al., QLoRA, arXiv 2305.14314, section 3. The layout is that of `bitsandbytes.functional.QuantState`: 64
weights share a scale, 256 scales share a second one, and the upper four bits of a byte come first. A weight is
table[code] · (table₂[code₂] · scale₂ + offset), each operation rounded to float32 and the result to the dtype.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dualtune_torch.kernels.gpu.launches import blocks_of, jit

BLOCK = 2048  # weights of a program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add would round once, where two are meant
WEIGHTS_OF_A_SCALE, SCALES_OF_A_SCALE = tl.constexpr(64), tl.constexpr(256)


def reference(codes: Tensor, state: Any) -> Tensor:
    """Return the matrix that bitsandbytes unpacks, in the dtype and shape of its QuantState."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(codes, state)


def fits(state: Any) -> bool:
    """Return whether a QuantState has the layout of this file: bitsandbytes can write others."""
    second = state.state2
    sizes = (WEIGHTS_OF_A_SCALE.value, SCALES_OF_A_SCALE.value)
    return state.quant_type == "nf4" and second is not None and (state.blocksize, second.blocksize) == sizes


def unpacked(codes: Tensor, state: Any) -> Tensor:
    """As `reference`, with the same bits."""
    second, weight = state.state2, torch.empty(state.shape, dtype=state.dtype, device=codes.device)
    kernel[(blocks_of(weight.numel(), BLOCK),)](
        codes, state.absmax, second.code, second.absmax, state.offset, state.code, weight, weight.numel(), BLOCK,
        **OPTIONS,
    )  # fmt: skip
    return weight


@jit
def kernel(codes, scale_codes, scale_table, second_scales, offset, table, weight, size, BLOCK: tl.constexpr):
    """One program: BLOCK weights."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at_byte = start // 2 + tl.arange(0, BLOCK // 2)
    inside = 2 * at_byte < size
    byte = tl.load(codes + at_byte, inside, 0).to(tl.int32)
    at_scale = 2 * at_byte // WEIGHTS_OF_A_SCALE
    scale = tl.load(scale_table + tl.load(scale_codes + at_scale, inside, 0).to(tl.int32))
    scale = scale * tl.load(second_scales + at_scale // SCALES_OF_A_SCALE, inside, 0.0) + tl.load(offset)
    first, second = tl.load(table + (byte >> 4)) * scale, tl.load(table + (byte & 15)) * scale
    at = start + tl.arange(0, BLOCK)
    tl.store(weight + at, tl.interleave(first, second).to(weight.dtype.element_ty), at < size)
