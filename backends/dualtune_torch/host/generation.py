"""The keys and values that the core keeps for the next generation."""

from __future__ import annotations

from transformers import DynamicCache


def crop_on_device(held: DynamicCache, excess: int) -> bool:
    """Remove this many tokens from the end. False if a sliding window has forgotten what would be needed again."""
    try:
        held.crop(-excess)
    except RuntimeError:
        return False
    return True
