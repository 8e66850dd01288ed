"""Read YAML into plain data with the place of every key, so that an error can name the line.

PyYAML's loader keeps the last of two equal keys, reads `1e-4` as a string, `on` as true, `016` as 14 and `1:30` as 90,
and expands aliases without limit. Here PyYAML only parses text into events; our code converts events to data. Scalars
follow YAML 1.2, where only true and false are booleans; tags and aliases are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)

from dualtune.config.problem import ConfigProblem, KeyPath, Location

UNREADABLE = object()  # replaces a value that has already been reported
_MAX_EVENTS = 50_000  # a config has a few hundred
_MAX_DEPTH = 20  # a config is three levels deep; the limit protects our recursion


class BadYaml(Exception):
    """The text is not one YAML document; it is not checked further."""

    def __init__(self, place: Location, message: str) -> None:
        super().__init__(message)
        self.problem = ConfigProblem(place, (), message)


@dataclass(slots=True)
class ParsedYaml:
    """The data of a text, the place of each key and item, and their problems."""

    data: Any = None
    places: dict[KeyPath, Location] = field(default_factory=dict[KeyPath, Location])
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])

    def place(self, path: KeyPath) -> Location:
        """Return the place of the path, or of the nearest part around it that has a place."""
        while path not in self.places and path:
            path = path[:-1]
        return self.places[path]


def read_yaml(text: str, source: str, *, with_lines: bool = True) -> ParsedYaml:
    """Read one document. Raises BadYaml for a syntax error; all other problems are collected in `problems`.

    An empty text gives None. `with_lines=False` is for an override, which has no meaningful line number.
    """
    return _Builder(_parse(text, source, with_lines), source, with_lines).build()


# --- Text to events --------------------------------------------------------------------------------------------------


def _parse(text: str, source: str, with_lines: bool) -> list[Event]:
    """Return the node events of the only document in the text."""

    def bad_yaml(line: int, column: int, message: str) -> BadYaml:
        return BadYaml(Location(source, line + 1, column + 1) if with_lines else Location(source), message)

    events: list[Event] = []
    depth, documents = 0, 0
    try:
        # One by one, because PyYAML's time is quadratic in the depth, and each event needs a kilobyte.
        for event in cast(Iterator[Event], yaml.parse(text, Loader=yaml.SafeLoader)):  # pyright: ignore[reportUnknownMemberType]
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            documents += isinstance(event, DocumentStartEvent)
            if documents > 1:
                raise bad_yaml(*_start(event), "a second YAML document begins here; only one is allowed")
            if depth > _MAX_DEPTH:
                raise bad_yaml(*_start(event), "nested too deeply")
            if len(events) == _MAX_EVENTS:
                raise bad_yaml(*_start(event), f"more than {_MAX_EVENTS} keys and values, too many for a config")
            events.append(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line, mark.column) if mark else (0, 0)
        raise bad_yaml(line, column, _in_plain_words(error)) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n"), error.position - before.rfind("\n") - 1
        raise bad_yaml(line, column, f"character U+{ord(text[error.position]):04X} is not allowed") from None
    except (ValueError, OverflowError):  # PyYAML raises these for "\UFFFFFFFF" and for very long numbers
        raise BadYaml(Location(source), "not valid YAML: an escape or a number is out of range") from None
    return [event for event in events if isinstance(event, NodeEvent | CollectionEndEvent)]


def _start(event: Event) -> tuple[int, int]:
    """Return line and column, from 0."""
    mark = cast(yaml.Mark, event.start_mark)
    return mark.line, mark.column


def _in_plain_words(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "unreadable"
    if "'\\t'" in problem:
        return "a tab is not allowed here; indent with spaces"
    if "mapping values are not allowed" in problem:
        return "a ':' is not allowed here; check the indentation, or put the value in quotes"
    return f"not valid YAML: {problem}"


# --- Events to data --------------------------------------------------------------------------------------------------


def _integer(text: str) -> int:
    number = int(text)  # raises for thousands of digits
    if abs(number) >= 2**63:
        raise ValueError("beyond 64 bits")
    return number


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


# The types of unquoted scalars; the first match wins. `render.py` quotes strings that match.
PLAIN_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"(~|null|Null|NULL|)\Z"), lambda _: None),
    "bool": (re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), lambda text: text.lower() == "true"),
    "int": (re.compile(r"[-+]?[0-9]+(_[0-9]+)*\Z"), _integer),
    "float": (
        re.compile(r"([-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN))\Z"),
        _float,
    ),
}


class _Builder:
    """Builds a document in one pass over the events."""

    def __init__(self, events: list[Event], source: str, with_lines: bool) -> None:
        self._events = iter(events)
        self._source = source
        self._with_lines = with_lines
        self._document = ParsedYaml(places={(): Location(source)})

    def build(self) -> ParsedYaml:
        for event in self._events:
            self._document.data = self._node(event, ())
        return self._document

    def _node(self, event: Event, path: KeyPath) -> Any:
        """Return the data of the node that begins with this event."""
        tag = cast(str | None, getattr(event, "tag", None))
        if isinstance(event, AliasEvent):
            self._report(event, path, "aliases (*name) are not allowed; write the value out")
        elif tag is not None:
            short = tag.replace("tag:yaml.org,2002:", "!!")
            self._report(event, path, f"tag {short} is not allowed; write a plain value, or text in quotes")
            self._skip(event)
        elif isinstance(event, ScalarEvent):
            return self._scalar(event, path)
        elif isinstance(event, MappingStartEvent):
            return self._mapping(path)
        else:
            return [self._child(item, item, (*path, index)) for index, item in enumerate(self._until_end())]
        return UNREADABLE

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_event in self._until_end():
            # The key as written: `1` and `true` are names here.
            key = cast(str, key_event.value) if isinstance(key_event, ScalarEvent) else None
            if key is not None and key not in data:
                data[key] = self._child(key_event, next(self._events), (*path, key))
                continue
            if key is None:
                self._report(key_event, (*path, "?"), "a key must be a name, not a list or mapping")
                self._skip(key_event)
            else:
                first = self._document.places[(*path, key)]
                self._report(key_event, (*path, key), f"given twice, first at {first}")
            self._skip(next(self._events))
        return data

    def _child(self, first: Event, value: Event, path: KeyPath) -> Any:
        self._document.places[path] = self._place(first)
        return self._node(value, path)

    def _scalar(self, event: ScalarEvent, path: KeyPath) -> Any:
        text = cast(str, event.value)
        is_plain = cast(tuple[bool, bool], event.implicit)[0]
        for pattern, construct in PLAIN_SCALARS.values() if is_plain else ():
            if pattern.match(text):
                try:
                    return construct(text)
                except ValueError:
                    self._report(event, path, "the number has too many digits")
                    return UNREADABLE
        return text

    def _until_end(self) -> Iterator[Event]:
        while not isinstance(event := next(self._events), CollectionEndEvent):
            yield event

    def _skip(self, start: Event) -> None:
        depth = 0
        for event in chain([start], self._events):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth == 0:
                return

    def _place(self, event: Event) -> Location:
        return Location(self._source, _start(event)[0] + 1) if self._with_lines else Location(self._source)

    def _report(self, event: Event, path: KeyPath, message: str) -> None:
        self._document.problems.append(ConfigProblem(self._place(event), path, message))
