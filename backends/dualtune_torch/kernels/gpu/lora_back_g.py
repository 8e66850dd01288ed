"""v = s · g B and dB += s · gᵀ u in one pass over g, the gradient of a LoRA layer's output.

Bytes, in 16 bits: reads g once (2·M·O); a program owns BLOCK_M tokens, so it writes dB of these in float32, and torch
adds them: 8·M·O·r / BLOCK_M for writing and reading. Two matrix products read g twice, 4·M·O. `pays` compares the two.
Formula: `dualtune_torch.kernels.lora`.

Legend: M tokens, O output features, r rank, P parts of the output features, N blocks of tokens.
"""

import torch
import triton.language as tl
from torch import Tensor

from dualtune_torch import lora
from dualtune_torch.kernels.gpu.launches import (
    REGISTERS,
    blocks_of,
    jit,
    length_of_part,
    parts_of,
    power_of_two,
    rows_of,
)

BLOCK_M, BLOCK_O, LARGEST_RANK = 128, 64, 64
OPTIONS = {"num_warps": 8, "num_stages": 2, "maxnreg": REGISTERS}

reference = lora.back_g  # writes v [M, r] in its dtype, and adds to dB [O, r] in float32


def back_g(g_MO: Tensor, B_Or: Tensor, u_Mr: Tensor, scale: float, v_Mr: Tensor, dB_Or: Tensor) -> None:
    """As `reference`, with products and sums in float32; only v is rounded. u and v may be columns of wider matrices.

    A u in float32 counts in full: the kernel multiplies by its 16 bits and by what these leave out.
    """
    (M, out_dim), r = g_MO.shape, B_Or.shape[1]
    g_MO, B_Or, u_Mr = rows_of(g_MO), rows_of(B_Or), rows_of(u_Mr)
    blocks_M = blocks_of(M, BLOCK_M)
    parts = parts_of(out_dim, BLOCK_O, blocks_M)
    v_PMr = g_MO.new_empty(parts, M, r, dtype=torch.float32)
    dB_NOr = g_MO.new_empty(blocks_M, out_dim, r, dtype=torch.float32)
    kernel[blocks_M, parts](
        g_MO, B_Or, u_Mr, v_PMr, dB_NOr, M, out_dim, r, g_MO.stride(0), B_Or.stride(0), u_Mr.stride(0), scale,
        length_of_part(out_dim, BLOCK_O, parts), BLOCK_M, BLOCK_O, power_of_two(r), u_Mr.dtype != g_MO.dtype, **OPTIONS,
    )  # fmt: skip
    v_Mr.copy_(v_PMr[0] if parts == 1 else v_PMr.sum(0))
    dB_Or += dB_NOr[0] if blocks_M == 1 else dB_NOr.sum(0)


def pays(M: int, out_dim: int, r: int, cache_bytes: int) -> bool:
    """Return whether one pass is predicted to take less time, by the bytes of device memory that it moves.

    A g that fits the cache of the device is read only once by the two products as well.
    """
    g, parts = 2 * M * out_dim, 8 * M * out_dim * r // BLOCK_M
    return g > cache_bytes and g + parts < 2 * g


@jit
def kernel(
    g, B, u, v, dB, M, out_dim, r, g_stride, B_stride, u_stride, scale, part_O,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, RANK: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens, one part of the output features, all ranks."""
    block, part = tl.program_id(0), tl.program_id(1)
    at_M, at_r = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, RANK)
    in_M, in_r = at_M < M, at_r < r
    u_Mr = tl.load(u + at_M[:, None] * u_stride + at_r[None, :], in_M[:, None] & in_r[None, :], 0.0)
    high_Mr = u_Mr.to(g.dtype.element_ty)
    low_Mr = (u_Mr - high_Mr).to(g.dtype.element_ty)
    g_rows = g + at_M[:, None].to(tl.int64) * g_stride
    sum_Mr = tl.zeros((BLOCK_M, RANK), tl.float32)
    for start in range(part * part_O, min(out_dim, (part + 1) * part_O), BLOCK_O):
        at_O = start + tl.arange(0, BLOCK_O)
        in_O = at_O < out_dim
        g_MO = tl.load(g_rows + at_O[None, :], in_M[:, None] & in_O[None, :], 0.0)
        B_Or = tl.load(B + at_O[:, None] * B_stride + at_r[None, :], in_O[:, None] & in_r[None, :], 0.0)
        sum_Mr = tl.dot(g_MO, B_Or, sum_Mr, input_precision="ieee")
        dB_Or = tl.dot(tl.trans(g_MO), high_Mr, input_precision="ieee")
        if IS_WIDE:
            dB_Or = tl.dot(tl.trans(g_MO), low_Mr, dB_Or, input_precision="ieee")
        rows = dB + (block.to(tl.int64) * out_dim + at_O[:, None]) * r
        tl.store(rows + at_r[None, :], dB_Or * scale, in_O[:, None] & in_r[None, :])
    rows = v + (part * M + at_M[:, None]).to(tl.int64) * r
    tl.store(rows + at_r[None, :], sum_Mr * scale, in_M[:, None] & in_r[None, :])
