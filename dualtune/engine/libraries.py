"""The other libraries that load an adapter: what they compute is what their users get.

A backend's card names those that run where its framework does (`Card.libraries`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import numpy as np

from dualtune.base.errors import ConfigError, EnvironmentFault, FormatError
from dualtune.engine.card import cards


class OtherLibrary(Protocol):
    """A base model with an adapter, in the hands of another library."""

    version: str  # of the library and of what it stands on, in words
    dtype: str
    warnings: tuple[str, ...]  # what it said of the adapter when it loaded it

    def logprobs(self, ids: Sequence[int], *, adapted: bool) -> np.ndarray:
        """Return log p float32 [T, V] after each token of a text, with the adapter or of the base alone."""
        ...


def library_names() -> list[str]:
    """Return the names of all libraries that a registered backend knows, installed or not."""
    return sorted(name for card in cards() for name in card.libraries)


def open_library(name: str, base: Path, adapter: Path) -> OtherLibrary:
    """Load a base and an adapter directory through another library.

    ConfigError for an unknown name, EnvironmentFault if it is not installed, FormatError if it does not load them.
    """
    card = next((card for card in cards() if name in card.libraries), None)
    if card is None:
        raise ConfigError(f"--with: got {name!r}, allowed: {', '.join(library_names())}")
    if find_spec(name.replace("-", "_")) is None:
        raise EnvironmentFault(f"--with {name}: it is not installed. Install it with: {card.package.command}")
    opened: Callable[[Path, Path], OtherLibrary] = resolve_name(card.libraries[name])
    try:
        return opened(base, adapter)
    except Exception as error:  # whatever the library raises, it is what its user gets
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise FormatError(f"{name} does not load {adapter} on {base}: {reason[:300]}") from error
