"""Which packages are here: for environment records, results, and what `check-gpu` prints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import metadata


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The version of each package that is installed, in the given order."""
    found: dict[str, str] = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
