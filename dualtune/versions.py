"""The version of dualtune and those of installed packages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

VERSION = "0.1.0"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed, in the given order."""
    from importlib import metadata  # late: `dualtune --help` imports this file

    found: dict[str, str] = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
