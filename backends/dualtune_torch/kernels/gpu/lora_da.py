"""dA += vᵀ dropout(x) in one pass over x: the mask is computed in registers, and dropout(x) is never written.

Bytes, in 16 bits: reads x (2·M·I) and v; writes the parts of dA in float32 and adds them (12·S·I for each part at
most). The plain code reads a dropout(x) that the forward pass has written, or writes it again if x was not kept: 2·M·I
or 6·M·I.
Formula: `dualtune_torch.kernels.lora`.

Legend: M tokens, I input features, S ranks of the group, P parts of the sum.
"""

import torch
import triton.language as tl
from torch import Tensor

from dualtune_torch.kernels.gpu.launches import (
    REGISTERS,
    blocks_of,
    is_kept,
    jit,
    length_of_part,
    parts_of,
    power_of_two,
    rows_of,
)
from dualtune_torch.lora import dropped

BLOCK_M, BLOCK_I, LARGEST_BLOCK_S = 64, 64, 128
STAGES = 3


def reference(
    dA_SI: Tensor, v_MS: Tensor, x_MI: Tensor, seeds_M: Tensor, keys_I: Tensor, lowest: int, factor: float
) -> None:
    """Add to dA [S, I], in float32."""
    dA_SI += v_MS.T @ dropped(x_MI, seeds_M, keys_I, lowest, factor)


def add_dA(
    dA_SI: Tensor, v_MS: Tensor, x_MI: Tensor, seeds_M: Tensor, keys_I: Tensor, lowest: int, factor: float
) -> None:
    """As `reference`, with products and sums in float32; nothing is rounded to 16 bits."""
    (M, in_dim), S = x_MI.shape, len(dA_SI)
    x_MI, v_MS, block_S = rows_of(x_MI), rows_of(v_MS), min(LARGEST_BLOCK_S, power_of_two(S))
    grid_I, grid_S = blocks_of(in_dim, BLOCK_I), blocks_of(S, block_S)
    parts = parts_of(M, BLOCK_M, grid_I * grid_S)
    dA_PSI = x_MI.new_empty(parts, S, in_dim, dtype=torch.float32)
    kernel[grid_I, grid_S, parts](
        dA_PSI, v_MS, x_MI, seeds_M, keys_I, M, in_dim, S, v_MS.stride(0), x_MI.stride(0), lowest, factor,
        length_of_part(M, BLOCK_M, parts), BLOCK_M, block_S, BLOCK_I,
        num_warps=4 if block_S <= 64 else 8, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
    dA_SI += dA_PSI[0] if parts == 1 else dA_PSI.sum(0)


@jit
def kernel(
    dA, v, x, seeds, keys, M, in_dim, S, v_stride, x_stride, lowest, factor, part_M,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_I input features, BLOCK_S ranks, one part of the tokens."""
    at_I = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    at_S = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    part = tl.program_id(2)
    in_I, in_S = at_I < in_dim, at_S < S
    keys_I = tl.load(keys + at_I, in_I, 0)
    sum_SI = tl.zeros((BLOCK_S, BLOCK_I), tl.float32)
    for start in range(part * part_M, min(M, (part + 1) * part_M), BLOCK_M):
        at_M = start + tl.arange(0, BLOCK_M)
        in_M = at_M < M
        kept_MI = is_kept(tl.load(seeds + at_M, in_M, 0), keys_I, lowest)
        x_rows = x + at_M[:, None].to(tl.int64) * x_stride
        x_MI = tl.load(x_rows + at_I[None, :], in_M[:, None] & in_I[None, :], 0.0)
        v_MS = tl.load(v + at_M[:, None] * v_stride + at_S[None, :], in_M[:, None] & in_S[None, :], 0.0)
        sum_SI = tl.dot(tl.trans(v_MS), tl.where(kept_MI, x_MI, 0.0).to(x_MI.dtype), sum_SI, input_precision="ieee")
    rows = dA + (part * S + at_S[:, None]).to(tl.int64) * in_dim
    tl.store(rows + at_I[None, :], sum_SI * factor, in_S[:, None] & in_I[None, :])
