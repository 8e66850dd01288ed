"""What is wrong with a config, and where: the lines of a ConfigError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KeyPath = tuple[str | int, ...]  # ("data", "train", 0, "weight")


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written: a line of a file (0: somewhere in it), or an override."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return ":".join([self.source, *(str(number) for number in (self.line, self.column) if number)])


class Problem(NamedTuple):
    """One thing that is wrong. The path is empty where it concerns no key."""

    place: Place
    path: KeyPath
    message: str

    def __str__(self) -> str:
        key = dotted(self.path)
        if not key or self.place.source == f"--set {key}":  # such a place says the key already
            return f"{self.place}: {self.message}"
        return f"{self.place}: {key}: {self.message}"


def dotted(path: KeyPath) -> str:
    """`data.train[0].weight`; a name that could garble a terminal is escaped."""
    names = (
        f"[{part}]" if isinstance(part, int) else "." + (part if part.isprintable() else repr(part)) for part in path
    )
    return "".join(names).removeprefix(".")
