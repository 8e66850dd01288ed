"""The memory beside a model that generates: how many tokens of keys and values, and how many adapters, fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualtune.engine.backend import MemoryStats
from dualtune.engine.memory.estimate import ITEM_BYTES
from dualtune.engine.memory.shapes import Decoder, UnknownShape, any_decoder

CACHE_SHARE = 0.4  # for keys and values: while rows enter, those of all are there twice
ENDED_SHARE = 0.25  # as many of these tokens beside them, of texts that have ended
BANK_SHARE = 0.25  # for the adapters of a batch


def cache_bytes(decoder: Decoder, dtype: str) -> int:
    """Return the bytes of the keys and values of a token in all layers."""
    return decoder.layers * 2 * decoder.kv_width * ITEM_BYTES.get(dtype, 4)


def cache_tokens(config: Mapping[str, Any], dtype: str, memory: MemoryStats) -> int | None:
    """Return for how many tokens keys and values fit; None if there is no formula for the model's config.json."""
    try:
        decoder = any_decoder(config)
    except UnknownShape:
        return None
    return int(CACHE_SHARE * _free(memory)) // cache_bytes(decoder, dtype)


def bank_numbers(dtype: str, memory: MemoryStats) -> int:
    """Return how many numbers a bank of adapters may have."""
    return int(BANK_SHARE * _free(memory)) // ITEM_BYTES.get(dtype, 8)


def _free(memory: MemoryStats) -> int:
    return max(0, memory.total_bytes - memory.used_bytes)
