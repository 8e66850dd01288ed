"""The binding of a bundle, covered by its signature: the name it was packed for, its base model, and a date.

A signature tells who wrote a file, not that it is the requested one. An old bundle, or one of another run, has a valid
signature too, and whoever controls the remote could offer it under any name. So BUNDLE.json holds both, and a reader
compares: the name always, the date if the reader sets a limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from dualtune.errors import ConfigError, FormatError
from dualtune.transfer.bundles.manifest import Bundle

UNBOUND = "BUNDLE.json has neither a name nor a date: an older dualtune packed it"
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE = re.compile(r"(\d{1,6}) ?([mhdw])", re.ASCII)
_SKEW = timedelta(hours=1)  # allowed difference between two clocks


@dataclass(frozen=True, slots=True)
class RequiredBinding:
    """What a reader requires."""

    found_as: str | None = None  # the name on the remote, if that is not the name of the file
    name: str | None = None  # the name that it must be bound to, whatever its file is called
    max_age: timedelta | None = None


ANY = RequiredBinding()


def check(
    bundle: Bundle,
    wanted: RequiredBinding,
    found_as: str | None,
    where: object,
    *,
    is_signed: bool,
    now: datetime | None = None,
) -> list[str]:
    """Return notes for the user on the binding. FormatError if it is not what was required.

    Without a signature the name proves nothing, because whoever can replace the file can also change the name in it:
    then a name that differs from the one it was found under is only a note.
    """
    if bundle.created is None:
        if wanted.name is not None or wanted.max_age is not None:
            raise FormatError(f"{where}: {UNBOUND}. --name and --max-age need them: pack it again")
        return [UNBOUND]
    if wanted.max_age is not None:
        _check_age(bundle.created, wanted.max_age, where, now or datetime.now(UTC))
    if wanted.name is not None:
        if wanted.name != bundle.name:
            raise FormatError(f"{where}: is the bundle {bundle.name!r}, --name requires {wanted.name!r}")
    elif found_as != bundle.name:
        mismatch = f"is the bundle {bundle.name!r}, found under the name {found_as!r}"
        if is_signed:
            raise FormatError(
                f"{where}: {mismatch}: it was renamed or replaced. If it is the one you want, add --name {bundle.name}"
            )
        return [f"{mismatch}; without a signature, neither name is proven"]
    return []


def _check_age(created: str, max_age: timedelta, where: object, now: datetime) -> None:
    age = now - datetime.fromisoformat(created)
    if age > max_age:
        raise FormatError(
            f"{where}: its content was written {created}, {in_days(age)} ago; --max-age allows {in_days(max_age)}. "
            "Get a newer bundle"
        )
    if age < -_SKEW:
        raise FormatError(f"{where}: its content was written {created}, which is in the future. Check both clocks")


def parse_age(text: str) -> timedelta:
    """Parse `90m`, `12h`, `7d` or `2w`. ConfigError for anything else."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--max-age: got {text!r}; allowed: a number and one of m, h, d and w, such as 7d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def in_days(age: timedelta) -> str:
    hours = age.total_seconds() / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
