"""The keys and values that the core keeps for the next generation."""

from __future__ import annotations

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from dualtune.backend.generation_cache import GenerationCache


def cropped(cache: GenerationCache, length: int) -> int:
    """Crop a cache to its first `length` tokens. Return how many are left: none where a layer cannot be cropped."""
    excess = len(cache.tokens) - length
    held = cache.on_device
    if held is not None and excess > 0:
        if can_trim_prompt_cache(held):
            trim_prompt_cache(held, excess)
        else:  # such as a rotating cache that has forgotten its first tokens
            held = None
    if held is None:
        length = 0
    cache.tokens, cache.on_device = cache.tokens[:length], held if length else None
    return length
