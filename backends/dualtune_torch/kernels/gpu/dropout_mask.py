"""The dropout mask in registers: the hash of `dualtune.adapter.dropout.keep_mask`, to the bit, in a Triton kernel."""

import triton.language as tl

from dualtune.adapter import dropout
from dualtune_torch.kernels.gpu.launches import jit
from dualtune_torch.lora import signed

MIX1, MIX2, SHIFT = tl.constexpr(signed(dropout.MIX1)), tl.constexpr(signed(dropout.MIX2)), tl.constexpr(dropout.SHIFT)


@jit
def is_kept(seeds_M, keys_I, lowest):
    """Which channels of which tokens are kept: bool [M, I] from int32 seeds [M] and keys [I]; products wrap."""
    h = (seeds_M[:, None] ^ keys_I[None, :]) * MIX1
    h ^= (h.to(tl.uint32, bitcast=True) >> SHIFT).to(tl.int32, bitcast=True)
    return h * MIX2 >= lowest
