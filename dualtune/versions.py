"""The version of dualtune and those of installed packages."""

from __future__ import annotations

import functools
from collections.abc import Iterable

VERSION = "0.1.0"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed, in the given order."""
    found = ((package, _version_of(package)) for package in packages)
    return {package: version for package, version in found if version is not None}


@functools.cache  # a checkpoint writes them, and each takes milliseconds
def _version_of(package: str) -> str | None:
    from importlib import metadata  # late: `dualtune --help` imports this file

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
