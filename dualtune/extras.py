"""Packages that only one option needs: each is an extra, and imported where it is used."""

from __future__ import annotations

import importlib
from typing import Any

from dualtune.errors import EnvironmentFault


def import_extra(module: str, extra: str, option: str) -> Any:
    """Import a module of an extra. EnvironmentFault, which says how to install it, if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = f"{module} cannot be imported ({error})"
        raise EnvironmentFault(f"{option}: {why}. Install it with: pip install 'dualtune[{extra}]'") from error
