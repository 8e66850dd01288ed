"""Did you mean …? The nearest of the allowed names, and the sentence that suggests it.

Nothing heavy is imported: `dualtune --help` imports this.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the allowed name that is most similar, or None if none is similar enough. `cutoff`: 1 is equal."""
    return next(iter(get_close_matches(name, list(allowed), n=1, cutoff=cutoff)), None)


def did_you_mean(*names: str) -> str:
    return f"Did you mean {either(names)}?"


def either(names: Iterable[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)
