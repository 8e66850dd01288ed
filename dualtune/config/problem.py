"""Problems of a config and their places: the lines of a ConfigError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KeyPath = tuple[str | int, ...]  # ("data", "train", 0, "weight")


@dataclass(frozen=True, slots=True)
class Location:
    """The origin of a value: a line of a file (0: unknown), or an override."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return ":".join([self.source, *(str(number) for number in (self.line, self.column) if number)])


class ConfigProblem(NamedTuple):
    """One problem. The path is empty if it is not about a key."""

    place: Location
    path: KeyPath
    message: str

    def __str__(self) -> str:
        key = dotted(self.path)
        if not key or self.place.source == f"--set {key}":  # such a place already names the key
            return f"{self.place}: {self.message}"
        return f"{self.place}: {key}: {self.message}"


def dotted(path: KeyPath) -> str:
    """Format a path, such as `data.train[0].weight`; unprintable names are escaped."""
    names = (
        f"[{part}]" if isinstance(part, int) else "." + (part if part.isprintable() else repr(part)) for part in path
    )
    return "".join(names).removeprefix(".")
