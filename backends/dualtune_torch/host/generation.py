"""The keys and values that the core keeps for the next generation."""

from __future__ import annotations

from dualtune.backend.generation_cache import GenerationCache


def cropped(cache: GenerationCache, length: int) -> int:
    """Crop a cache to its first `length` tokens. Return how many are left: none where a layer cannot be cropped."""
    excess = len(cache.tokens) - length
    held = cache.on_device
    if held is not None and excess > 0:
        try:
            held.crop(-excess)
        except RuntimeError:  # a sliding window has forgotten what would be needed again
            held = None
    if held is None:
        length = 0
    cache.tokens, cache.on_device = cache.tokens[:length], held if length else None
    return length
