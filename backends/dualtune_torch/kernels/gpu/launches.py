"""What the kernels' launches share: how a reduction is cut into parts, and what a kernel asks of its tensors.

There are no atomic additions. A reduction that is cut in parts writes each part to its own place, and torch adds them:
the same numbers give the same bits, so `torch.use_deterministic_algorithms` has nothing to switch off.

Nor is there an autotuner. The sizes of blocks are constants, for which the kernels are compiled ahead of time on every
architecture (`benchmarks/triton_kernels.py`). Timing would choose another order of addition from run to run, and
compile each candidate again for every new length of a batch.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dualtune.model import dropout
from dualtune_torch.lora import signed

jit: Any = triton.jit  # its types would have every argument of a launch be a constant of the kernel

PROGRAMS = 256  # about two for each multiprocessor of a large GPU (an H100 has 132)
REGISTERS = 255  # of a thread at most, all that there are: left alone, the assembler for sm_100 spills to save some
BLOCKS_OF_A_PART = 4  # at least: what a part writes in float32 must be little beside what it reads


def blocks_of(length: int, block: int) -> int:
    """Return how many blocks cover a length."""
    return -(-length // block)


def parts_of(length: int, block: int, programs: int) -> int:
    """Return into how many parts to cut a reduction over `length`, when everything else gives so many programs."""
    return max(1, min(length // (BLOCKS_OF_A_PART * block), PROGRAMS // max(1, programs)))  # none without a token


def length_of_part(length: int, block: int, parts: int) -> int:
    """Return the length of each of these parts, a multiple of the block."""
    return blocks_of(length, block * parts) * block


def power_of_two(number: int) -> int:
    """Return the next power of two, at least 16: the least size in a product on tensor cores."""
    return max(16, 1 << (number - 1).bit_length())


def rows_of(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous, as every kernel reads it: a copy only if it is not so yet."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# The dropout mask in registers: the hash of `dualtune.model.dropout.keep_mask`, to the bit, in a Triton kernel.

MIX1, MIX2, SHIFT = tl.constexpr(signed(dropout.MIX1)), tl.constexpr(signed(dropout.MIX2)), tl.constexpr(dropout.SHIFT)


@jit
def is_kept(seeds_M, keys_I, lowest):
    """Which channels of which tokens are kept: bool [M, I] from int32 seeds [M] and keys [I]; products wrap."""
    h = (seeds_M[:, None] ^ keys_I[None, :]) * MIX1
    h ^= (h.to(tl.uint32, bitcast=True) >> SHIFT).to(tl.int32, bitcast=True)
    return h * MIX2 >= lowest
