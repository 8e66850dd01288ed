"""The version of dualtune and those of installed packages."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

from dualtune.base.errors import EnvironmentFault

VERSION = "0.1.0"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that is installed, in the given order."""
    versions = ((package, _version_of(package)) for package in packages)
    return {package: version for package, version in versions if version is not None}


@functools.cache  # a checkpoint writes them, and each takes milliseconds
def _version_of(package: str) -> str | None:
    from importlib import metadata  # late: `dualtune --help` imports this file

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Packages that only one option needs: each is an extra, and imported where it is used.


def import_extra(module: str, extra: str, option: str) -> Any:
    """Import a module of an extra. EnvironmentFault, which says how to install it, if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = f"{module} cannot be imported ({error})"
        raise EnvironmentFault(f"{option}: {why}. Install it with: pip install 'dualtune[{extra}]'") from error
