"""dx += dropout(v A) in one pass over dx: the mask is computed in registers, and v A is never written.

Bytes, in 16 bits: reads and writes dx (4·M·I), and v and A once for each block. The plain code also writes v A and
reads it again: 8·M·I. Formula: `dualtune_torch.kernels.lora`.

dA has a kernel of its own (`lora_da.py`). One kernel for both would read v once instead of twice, which is r / I of
what it reads; but dA is a sum over the tokens and dx is not, so it would have to walk through all tokens with few
programs.

Legend: M tokens, I input features, S ranks of the group.
"""

import triton.language as tl
from torch import Tensor

from dualtune_torch.kernels.gpu.launches import REGISTERS, blocks_of, is_kept, jit, power_of_two, rows_of
from dualtune_torch.lora import dropped

BLOCK_M, BLOCK_I, LARGEST_BLOCK_S = 64, 64, 64
OPTIONS = {"num_warps": 4, "num_stages": 2, "maxnreg": REGISTERS}


def reference(
    dx_MI: Tensor, v_MS: Tensor, A_SI: Tensor, seeds_M: Tensor, keys_I: Tensor, lowest: int, factor: float
) -> None:
    """Add the gradient that passes through the dropout to dx [M, I]."""
    dx_MI += dropped(v_MS @ A_SI, seeds_M, keys_I, lowest, factor)


def add_dx(
    dx_MI: Tensor, v_MS: Tensor, A_SI: Tensor, seeds_M: Tensor, keys_I: Tensor, lowest: int, factor: float
) -> None:
    """As `reference`; only the new dx is rounded. The rows of dx must be contiguous."""
    (M, in_dim), S = dx_MI.shape, len(A_SI)
    v_MS, A_SI = rows_of(v_MS), rows_of(A_SI)
    kernel[blocks_of(M, BLOCK_M), blocks_of(in_dim, BLOCK_I)](
        dx_MI, v_MS, A_SI, seeds_M, keys_I, M, in_dim, S, dx_MI.stride(0), v_MS.stride(0), A_SI.stride(0),
        lowest, factor, BLOCK_M, min(LARGEST_BLOCK_S, power_of_two(S)), BLOCK_I, **OPTIONS,
    )  # fmt: skip


@jit
def kernel(
    dx, v, A, seeds, keys, M, in_dim, S, dx_stride, v_stride, A_stride, lowest, factor,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens, BLOCK_I input features, all ranks."""
    at_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    in_M, in_I = at_M < M, at_I < in_dim
    sum_MI = tl.zeros((BLOCK_M, BLOCK_I), tl.float32)
    for start in range(0, S, BLOCK_S):
        at_S = start + tl.arange(0, BLOCK_S)
        in_S = at_S < S
        v_MS = tl.load(v + at_M[:, None] * v_stride + at_S[None, :], in_M[:, None] & in_S[None, :], 0.0)
        A_SI = tl.load(A + at_S[:, None] * A_stride + at_I[None, :], in_S[:, None] & in_I[None, :], 0.0)
        sum_MI = tl.dot(v_MS, A_SI, sum_MI, input_precision="ieee")
    kept_MI = is_kept(tl.load(seeds + at_M, in_M, 0), tl.load(keys + at_I, in_I, 0), lowest)
    places, inside = dx + at_M[:, None].to(tl.int64) * dx_stride + at_I[None, :], in_M[:, None] & in_I[None, :]
    new_MI = tl.load(places, inside, 0.0) + tl.where(kept_MI, sum_MI * factor, 0.0)
    tl.store(places, new_MI.to(dx.dtype.element_ty), inside)
