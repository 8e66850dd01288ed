"""The keys and values that the core keeps for the next generation."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache


def crop_on_device(held: list[Any], excess: int) -> bool:
    """Remove this many tokens from the end. False where a rotating cache has forgotten what would be needed again."""
    if not can_trim_prompt_cache(held):
        return False
    trim_prompt_cache(held, excess)
    return True
