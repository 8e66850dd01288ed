"""MLX's affine quantization of 4 and 8 bits, unpacked in one launch.

Bytes: reads half a byte (or one) a weight and 1/32 number for its scale and bias, writes the weight once. The plain
code takes seven kernels, which write and read a matrix five times.

The layout and the rounding are those of `dualtune_torch.weights.affine`: 64 weights share a scale and a bias, the lower
four bits of a byte come first, and q · scale is rounded to the dtype of the scales before the bias is added.
"""

import triton.language as tl
from torch import Tensor

from dualtune_torch.kernels.gpu.launches import blocks_of, jit
from dualtune_torch.weights.affine import GROUP_SIZE, Packed, dequantize

BLOCK = 2048  # weights of a program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add would round once, where two are meant
WEIGHTS_OF_A_SCALE = tl.constexpr(GROUP_SIZE)

reference = dequantize


def unpacked(packed: Packed) -> Tensor:
    """As `reference`, with the same bits: the weights [..., I] in the dtype of the scales."""
    codes, scales, biases = (tensor.contiguous() for tensor in packed)
    weight = scales.new_empty(*scales.shape[:-1], scales.shape[-1] * GROUP_SIZE)
    if weight.numel():
        grid = (blocks_of(weight.numel(), BLOCK),)
        kernel[grid](codes, scales, biases, weight, weight.numel(), packed.bits, BLOCK, **OPTIONS)
    return weight


@jit
def kernel(codes, scales, biases, weight, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK weights."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if BITS == 4:
        at_byte = start // 2 + tl.arange(0, BLOCK // 2)
        byte = tl.load(codes + at_byte, 2 * at_byte < size, 0)
        q = tl.interleave(byte & 15, byte >> 4)
    else:
        q = tl.load(codes + at, at < size, 0)
    at_scale = at // WEIGHTS_OF_A_SCALE
    scale = tl.load(scales + at_scale, at < size, 0.0).to(tl.float32)
    bias = tl.load(biases + at_scale, at < size, 0.0).to(tl.float32)
    product = (q.to(tl.float32) * scale).to(weight.dtype.element_ty).to(tl.float32)
    tl.store(weight + at, (product + bias).to(weight.dtype.element_ty), at < size)
