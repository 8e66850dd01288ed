"""u = dropout(x) Aᵀ in one pass over x: the mask is computed in registers, and dropout(x) is never written.

Bytes, in 16 bits: reads x (2·M·I) and A once for each block of tokens (from the cache), writes u. The plain code also
writes dropout(x) and reads it again: 6·M·I. Formula: `dualtune_torch.kernels.lora`.

Legend: M tokens, I input features, S ranks of the group.
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


def reference(x_MI: Tensor, A_SI: Tensor, seeds_M: Tensor, keys_I: Tensor, lowest: int, factor: float) -> Tensor:
    """Return u [M, S] in the dtype of x. Dropout as in `dualtune_torch.lora.dropped`."""
    return dropped(x_MI, seeds_M, keys_I, lowest, factor) @ A_SI.T


def lora_down(x_MI: Tensor, A_SI: Tensor, seeds_M: Tensor, keys_I: Tensor, lowest: int, factor: float) -> Tensor:
    """As `reference`, with products and sums in float32; only u is rounded."""
    (M, in_dim), S = x_MI.shape, len(A_SI)
    x_MI, A_SI, block_S = rows_of(x_MI), rows_of(A_SI), min(LARGEST_BLOCK_S, power_of_two(S))
    grid_M, grid_S = blocks_of(M, BLOCK_M), blocks_of(S, block_S)
    parts = parts_of(in_dim, BLOCK_I, grid_M * grid_S)
    u_PMS = x_MI.new_empty(parts, M, S, dtype=x_MI.dtype if parts == 1 else torch.float32)
    kernel[grid_M, grid_S, parts](
        x_MI, A_SI, seeds_M, keys_I, u_PMS, M, in_dim, S, x_MI.stride(0), A_SI.stride(0), lowest, factor,
        length_of_part(in_dim, BLOCK_I, parts), BLOCK_M, block_S, BLOCK_I,
        num_warps=4 if block_S <= 64 else 8, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
    return u_PMS[0] if parts == 1 else u_PMS.sum(0).to(x_MI.dtype)


@jit
def kernel(
    x, A, seeds, keys, u, M, in_dim, S, x_stride, A_stride, lowest, factor, part_I,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens, BLOCK_S ranks, one part of the input features."""
    at_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_S = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    part = tl.program_id(2)
    in_M, in_S = at_M < M, at_S < S
    seeds_M = tl.load(seeds + at_M, in_M, 0)
    x_rows, A_rows = x + at_M[:, None].to(tl.int64) * x_stride, A + at_S[:, None] * A_stride
    sum_MS = tl.zeros((BLOCK_M, BLOCK_S), tl.float32)
    for start in range(part * part_I, min(in_dim, (part + 1) * part_I), BLOCK_I):
        at_I = start + tl.arange(0, BLOCK_I)
        in_I = at_I < in_dim
        kept_MI = is_kept(seeds_M, tl.load(keys + at_I, in_I, 0), lowest)
        x_MI = tl.load(x_rows + at_I[None, :], in_M[:, None] & in_I[None, :], 0.0)
        A_SI = tl.load(A_rows + at_I[None, :], in_S[:, None] & in_I[None, :], 0.0)
        sum_MS = tl.dot(tl.where(kept_MI, x_MI, 0.0).to(x_MI.dtype), tl.trans(A_SI), sum_MS, input_precision="ieee")
    u_rows = u + (part * M + at_M[:, None]).to(tl.int64) * S
    tl.store(u_rows + at_S[None, :], (sum_MS * factor).to(u.dtype.element_ty), in_M[:, None] & in_S[None, :])
