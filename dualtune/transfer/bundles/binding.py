"""What a bundle is bound to, by what is signed: the name it was packed for, its base model, and a date.

A signature says whose a file is, not which one was asked for. An old bundle, or one of another run, has a good
signature too, and whoever keeps the place where bundles lie could offer it under any name. So BUNDLE.json says both,
and a reader compares: the name always, the date where it sets a limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from dualtune.errors import ConfigError, FormatError
from dualtune.transfer.bundles.manifest import Bundle

UNBOUND = "neither its name nor a date is in what is signed: an older dualtune packed it"
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE = re.compile(r"(\d{1,6}) ?([mhdw])", re.ASCII)
_SKEW = timedelta(hours=1)  # by how much two clocks may differ


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader asks for."""

    found_as: str | None = None  # the name under which it lay, where that is not the file's
    name: str | None = None  # the name that it must be bound to, whatever it is called there
    max_age: timedelta | None = None


ANY = Wanted()


def check(
    bundle: Bundle, wanted: Wanted, found_as: str | None, where: object, *, is_signed: bool, now: datetime | None = None
) -> list[str]:
    """What a user should know of the binding. FormatError if it is not what was asked for.

    Without a signature a name proves nothing, because who can exchange the file can write another one into it: then
    another name than the one it was found under is only told.
    """
    if bundle.created is None:
        if wanted.name is not None or wanted.max_age is not None:
            raise FormatError(f"{where}: {UNBOUND}, and --name or --max-age asks for them. Have it packed again")
        return [UNBOUND]
    if wanted.max_age is not None:
        _check_age(bundle.created, wanted.max_age, where, now or datetime.now(UTC))
    if wanted.name is not None:
        if wanted.name != bundle.name:
            raise FormatError(f"{where}: is the bundle {bundle.name!r}, and --name asks for {wanted.name!r}")
    elif found_as != bundle.name:
        told = f"is the bundle {bundle.name!r}, found under the name {found_as!r}"
        if is_signed:
            raise FormatError(
                f"{where}: {told}: renamed, or exchanged. If it is the one you want, say so with --name {bundle.name}"
            )
        return [f"{told}; without a signature nobody vouches for either"]
    return []


def _check_age(created: str, max_age: timedelta, where: object, now: datetime) -> None:
    age = now - datetime.fromisoformat(created)
    if age > max_age:
        raise FormatError(
            f"{where}: what it holds was written {created}, {in_days(age)} ago; --max-age allows {in_days(max_age)}. "
            "Ask for a newer one"
        )
    if age < -_SKEW:
        raise FormatError(f"{where}: what it holds was written {created}, which is to come. Compare the clocks")


def parse_age(text: str) -> timedelta:
    """`90m`, `12h`, `7d` or `2w`. ConfigError for anything else."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--max-age: got {text!r}; allowed: a number and one of m, h, d and w, such as 7d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def in_days(age: timedelta) -> str:
    hours = age.total_seconds() / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
