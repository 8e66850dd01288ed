"""The packages that dualtune requires, read from its metadata: minimum versions are only in pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dualtune.card import Package
from dualtune.checks import Check

OURSELVES = "dualtune"


def least_python() -> SpecifierSet:
    """Return the Python versions that dualtune runs on."""
    return SpecifierSet(metadata.metadata(OURSELVES)["Requires-Python"])


def requirements(package: Package, system: str) -> list[Requirement]:
    """Return the requirements of dualtune, then those of a backend's package, on a system ("Linux", "Darwin")."""
    base, own = _required(OURSELVES, "", system), _required(package.distribution, package.extra, system)
    return base + [one for one in own if one not in base]


def _required(distribution: str, extra: str, system: str) -> list[Requirement]:
    """Return the requirements of `pip install 'distribution[extra]'`."""
    required = [Requirement(line) for line in metadata.requires(distribution) or []]
    where = {"extra": extra, "platform_system": system}
    return [one for one in required if one.marker is None or one.marker.evaluate(where)]


def at_least(found: str, least: str) -> bool:
    """Return whether a version is at least another: 0.10 is newer than 0.7, and 13.0 than 12.1."""
    return Version(found) >= Version(least)


def package_checks(required: list[Requirement], command: str, installed: Mapping[str, str]) -> list[Check]:
    """Return a row for each package. `command` installs all of them."""
    return [_package_check(one, command, installed.get(one.name)) for one in required]


def _package_check(required: Requirement, command: str, found: str | None) -> Check:
    needed = f"{required.name}{required.specifier}"
    if found is None:
        return Check(required.name, "fail", f"not installed, {needed} is needed", command)
    try:
        fits = required.specifier.contains(Version(found), prereleases=True)  # a nightly counts as its version number
    except InvalidVersion:
        fits = False
    if fits:
        return Check(required.name, "ok", found)
    return Check(required.name, "fail", f"got {found}, {needed} is needed", f"pip install --upgrade '{needed}'")
