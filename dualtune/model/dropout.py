"""LoRA dropout as a pure function, not a random stream: the same mask on every backend, and no state to save.

An integer hash decides whether the input channel `i` of an adapted module is kept for a token. It combines the token's
dropout seed (`Batch.dropout_seeds_BT`, drawn by the core from (seed, step, document, position)) and the channel's key
(drawn from the module's path; modules that read the same activations share a mask, so that these are dropped once). So
a mask does not depend on the micro-batch size, the packing or the number of processes.

The functions here are the reference; an engine computes `keep_mask` with four integer operations on its device.
"""

from __future__ import annotations

import zlib

import numpy as np

from dualtune.base.errors import ConfigError

# Multipliers of MurmurHash3's finalizer (https://github.com/aappleby/smhasher, public domain).
MIX1, MIX2 = 0x85EBCA6B, 0xC2B2AE35
SHIFT = 15


# Modules with the same input activations in a transformer block, by the last part of the path.
SHARED_INPUT = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def input_of(module: str) -> str:
    """Return a name for a module's input: equal for modules with the same input."""
    parent, dot, name = module.rpartition(".")
    return f"{parent}{dot}{SHARED_INPUT.get(name, name)}"


def channel_keys(module: str, in_dim: int) -> np.ndarray:
    """Return uint32 [in]: a random key for every input channel of a module."""
    rng = np.random.default_rng(zlib.crc32(input_of(module).encode()))
    return rng.integers(0, 1 << 32, in_dim, dtype=np.uint32)


def check_tokens(num_tokens: int, num_seeds: int) -> None:
    """Raise ConfigError if a layer gets other tokens than those of the batch: their seeds cannot be told apart."""
    if num_tokens != num_seeds:
        raise ConfigError(
            f"adapter.dropout: this model calls an adapted layer with {num_tokens} of the {num_seeds} tokens of a "
            "batch (experts get a part of them, some layers one at a time), so their dropout is unknown. Set "
            "adapter.dropout: 0, or leave such layers out of adapter.targets"
        )


def threshold(dropout: float) -> int:
    """Return the lowest hash, as a signed 32-bit integer, that is kept: P(keep) = 1 − dropout."""
    return round(dropout * 2.0**32) - 2**31


def keep_mask(seeds: np.ndarray, keys: np.ndarray, dropout: float) -> np.ndarray:
    """Return bool [..., in] from dropout seeds uint32 [...] and channel keys uint32 [in]."""
    x = seeds[..., None] ^ keys
    x = x * np.uint32(MIX1)
    x = x ^ (x >> np.uint32(SHIFT))
    x = x * np.uint32(MIX2)
    return x.view(np.int32) >= threshold(dropout)
