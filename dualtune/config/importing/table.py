"""Translation tables: rules for the keys of another trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from dualtune.base.errors import ConfigError
from dualtune.base.redaction import redact
from dualtune.config.load import ParsedYaml
from dualtune.config.values import KeyPath, dotted
from dualtune.config.words import show

Settings = dict[str, Any]  # our key, such as "adapter.rank" -> its value, or a Note


class Note(NamedTuple):
    """A value with a comment."""

    value: Any
    comment: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for the named keys: they are translated together, not needed, or have no counterpart.

    A name that ends in `*` matches all keys with that prefix. `convert` returns our settings. It is also called if the
    file has none of the keys, because the other trainer's defaults then apply.
    """

    names: tuple[str, ...]
    keys: str = ""  # of our config, as shown to the reader; "" if there are none
    note: str = ""  # what differs; or why there is no such key, and what to do instead
    convert: Callable[[ForeignFile], Settings] | None = None
    is_needless: bool = False  # whether nothing is lost without it

    def matches(self, key: str) -> bool:
        return any(key.startswith(name[:-1]) if name.endswith("*") else key == name for name in self.names)


def translated(names: str, keys: str, convert: Callable[[ForeignFile], Settings], note: str = "") -> Rule:
    return Rule(tuple(names.split()), keys, note, convert)


def renamed(name: str, key: str, read: Callable[..., Any], note: str = "", **options: Any) -> Rule:
    """Make a rule for a name whose value our key takes as a method of the file reads it. None sets nothing."""

    def convert(file: ForeignFile) -> Settings:
        value = read(file, name, **options)
        return {} if value is None else {key: file.note(value, name)}

    return translated(name, key, convert, note)


def needless(names: str, note: str) -> Rule:
    return Rule(tuple(names.split()), note=note, is_needless=True)


def absent(names: str, note: str, keys: str = "") -> Rule:
    """Make a rule for names without a counterpart; `keys` are similar ones of ours."""
    return Rule(tuple(names.split()), keys, note)


@dataclass(frozen=True, slots=True)
class Setting:
    """A line of the translated config, with its origin as a comment."""

    key: str
    value: Any
    comment: str


@dataclass(frozen=True, slots=True)
class Untranslated:
    """A key without a line in the translated config."""

    key: str
    value: str  # formatted to be shown
    reason: str


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The result of translating another trainer's file."""

    trainer: str
    source: str
    settings: list[Setting]
    lost: list[Untranslated]  # the training result differs, or may differ, without these
    needless: list[Untranslated]


class ForeignFile:
    """The keys of a file, read with the other trainer's defaults, and lists of what was not translated."""

    def __init__(
        self, document: ParsedYaml, trainer: str, defaults: Mapping[str, Any],
        count_layers: Callable[[str], int | None] = lambda model: None,
    ) -> None:  # fmt: skip
        """`count_layers`: the number of layers of a model, if it is available locally."""
        self._document, self._trainer, self._defaults = document, trainer, defaults
        self._data = cast(dict[str, Any], document.data)
        self.count_layers = count_layers
        self.lost: list[Untranslated] = []
        self.needless: list[Untranslated] = []

    def __contains__(self, name: str) -> bool:
        """Return whether the file sets a value other than null."""
        return self._find(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the file sets the top-level key to null, which may mean something else than its absence."""
        return name in self._data and self._data[name] is None

    def _find(self, name: str) -> Any:
        value: Any = self._data
        for part in name.split("."):
            value = table_in(value).get(part)
        return value

    def get(self, name: str) -> Any:
        """Return the value in the file, or the other trainer's default."""
        value = self._find(name)
        return self._defaults.get(name) if value is None else value

    def number(self, name: str) -> float:
        """Return a finite number; a string with a number is accepted, as in the other trainer."""
        value = self.get(name)
        try:
            number = math.nan if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.wrong(name, "must be a number")
        return number

    def count(self, name: str, least: int = 1) -> int:
        number = self.number(name)
        if not number.is_integer() or number < least:
            raise self.wrong(name, f"must be an integer >= {least}")
        return int(number)

    def flag(self, name: str) -> bool:
        """Return a boolean; yes, no, on and off count as in YAML 1.1."""
        value = self.get(name)
        word = str(value).lower()
        if value is None or word in ("false", "no", "off", ""):
            return False
        if word in ("true", "yes", "on"):
            return True
        raise self.wrong(name, "must be true or false")

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value or None
        raise self.wrong(name, "must be a string")

    def model(self, name: str) -> str:
        if (model := self.text(name)) is None:
            raise self.wrong(name, "must be a hub id or a directory")
        return model

    def tables(self, name: str) -> list[dict[str, Any]]:
        """Return the mappings of a list, or the single one in its place, each with a path."""
        value = self.get(name)
        entries = cast(list[Any], value) if isinstance(value, list) else [value]
        if not entries or not all(isinstance(table_in(entry).get("path"), str) for entry in entries):
            raise self.wrong(name, "must be a mapping with a path, or a list of such mappings")
        return entries

    def assume(self, **defaults: Any) -> None:
        """Take these for the other trainer's defaults from now on: they depend on other keys of the file."""
        self._defaults = {**self._defaults, **defaults}

    def note(self, value: Any, *names: str) -> Note:
        """Return a value with its origin, the keys `names`, as its comment."""
        origin = ", ".join(f"{name}: {shown(self.get(name))}" for name in names if name in self)
        return Note(value, origin or f"the default of {self._trainer}")

    def wrong(self, name: str, rule: str) -> ConfigError:
        path: KeyPath = tuple(name.split("."))
        return ConfigError(redact(f"{self._document.place(path)}: {dotted(path)}: got {show(self.get(name))}, {rule}"))

    def lose(self, name: str, reason: str, value: Any = None) -> None:
        """Record a key that is lost, in whole or in part."""
        self.lost.append(Untranslated(name, shown(self.get(name) if value is None else value), reason))

    def skip(self, name: str, reason: str, value: Any = None) -> None:
        """Record a key that is not needed here."""
        self.needless.append(Untranslated(name, shown(self.get(name) if value is None else value), reason))

    def skip_all(self, names: str, reason: str) -> None:
        for name in names.split():
            if name in self:
                self.skip(name, reason)


def table_in(value: Any) -> dict[str, Any]:
    """Return a mapping; an empty one in place of anything else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def shown(value: Any) -> str:
    """Format a foreign value for a one-line comment: shortened, without secrets and control characters."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {shown(inner)}" for key, inner in table_in(value).items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(map(shown, cast(list[Any], value))) + "]"
    elif isinstance(value, str):
        text = value if value.isprintable() and value else repr(value)
    else:
        text = show(value)
    text = redact(text)
    return text if len(text) <= 80 else f"{text[:60]}…"


def is_off(value: Any) -> bool:
    """Return whether a value turns something off: null, false, zero, or an empty string, list or mapping."""
    return not value or value in ("false", "no", "off", "none", "no_", "False")
