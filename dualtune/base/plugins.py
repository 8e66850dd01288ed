"""What packages register by entry point: backends, hooks, and what is chosen by its name in a config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from dualtune.base import fields
from dualtune.base.errors import ConfigError


def points_of(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, as `importlib.metadata.entry_points`, which reads files of all packages."""
    return _points(group, tuple(map(_state, sys.path)))


@lru_cache(maxsize=16)
def _points(group: str, path: Hashable) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _state(directory: str) -> tuple[str, int | None]:
    """Return what is another one after a package was installed into a directory of `sys.path`."""
    with suppress(OSError):
        return directory, Path(directory).stat().st_mtime_ns
    return directory, None


def installed(
    group: str, name: str, *, key: str, others: Sequence[str], parts: Sequence[str], page: str,
    fault_of: Callable[[Any], str] = lambda made: "",
) -> Callable[[Any], Any]:  # fmt: skip
    """Return what makes, from a config, the object that a package has registered under this name of a group.

    It is a callable, such as a class, whose result has the attributes `parts` and the `name` of the entry point, since
    checkpoints and configs find it by that. `key`: of the config, in which `others` may stand too; `page` documents it.
    `fault_of` returns what else is wrong with such an object, "" if nothing is. ConfigError if none is installed, or it
    cannot be used.
    """
    make, origin = registered(group, name, key=key, others=others, page=page)

    def made_of(config: Any) -> Any:
        product = make(config)
        if missing := [part for part in parts if not hasattr(product, part)]:
            raise ConfigError(f"{origin} returned a {type(product).__name__} without {', '.join(missing)}")
        if product.name != name:
            raise ConfigError(f"{origin} has the name {product.name!r}, it must be that of its entry point")
        if fault := fault_of(product):
            raise ConfigError(f"{origin} {fault}")
        return product

    return made_of


def registered(group: str, name: str, *, key: str, others: Sequence[str], page: str) -> tuple[Any, str]:
    """Return what a package has registered under this name of a group, and how messages call it.

    The arguments and errors are those of `installed`.
    """
    points = {point.name: point for point in points_of(group)}
    if name not in points:
        allowed = ", ".join([*others, *sorted(points)])
        raise ConfigError(
            f"{key}: got {fields.shown(name)!r}, allowed: {allowed}. Install the package that has it; a package "
            f"registers one as an entry point of the group {group}: {page}"
        )
    origin = f"{key}: {name} ({points[name].value})"
    try:
        return points[name].load(), origin
    except Exception as error:  # foreign code
        raise ConfigError(f"{origin} cannot be loaded: {type(error).__name__}: {error}") from error
