"""Load a config file with `--set` overrides. One ConfigError names all problems at once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError
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

from dualtune.base.errors import ConfigError
from dualtune.base.files import did_you_mean_path
from dualtune.base.redaction import redact
from dualtune.config.advice import unknown_key
from dualtune.config.rates import with_usual_rate
from dualtune.config.schema import Config, sections
from dualtune.config.values import ConfigProblem, KeyPath, Location, dotted
from dualtune.config.words import examples, is_union, missing, wrong_value

# ----------------------------------------------------------------------------------------------------------------------
# Read YAML into plain data with the place of every key, so that an error can name the line.
#
# PyYAML's loader keeps the last of two equal keys, reads `1e-4` as a string, `on` as true, `016` as 14 and `1:30` as
# 90, and expands aliases without limit. Here PyYAML only parses text into events; our code converts events to data.
# Scalars follow YAML 1.2, where only true and false are booleans; tags and aliases are refused.

# The parser in C, where PyYAML was built with it. What it refuses is parsed again, because its errors are others, and
# it is not asked for what it reads otherwise: tabs inside of words, `|#`, and byte order marks.
LIBYAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OTHERWISE = re.compile(r"[\t\ufeff]|[|>][-+0-9]*#")
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

    def parsed(loader: Any) -> list[Event]:
        events: list[Event] = []
        depth, documents = 0, 0
        # One by one, because PyYAML's time is quadratic in the depth, and each event needs a kilobyte.
        for event in cast(Iterator[Event], yaml.parse(text, Loader=loader)):  # pyright: ignore[reportUnknownMemberType]
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            documents += isinstance(event, DocumentStartEvent)
            if documents > 1:
                raise bad_yaml(*_start(event), "a second YAML document begins here; only one is allowed")
            if depth > _MAX_DEPTH:
                raise bad_yaml(*_start(event), "nested too deeply")
            if len(events) == _MAX_EVENTS:
                raise bad_yaml(*_start(event), f"more than {_MAX_EVENTS} keys and values, too many for a config")
            events.append(event)
        return [event for event in events if isinstance(event, NodeEvent | CollectionEndEvent)]

    if not _OTHERWISE.search(text):
        with contextlib.suppress(BadYaml, yaml.YAMLError, ValueError):
            return parsed(LIBYAML)
    try:
        return parsed(yaml.SafeLoader)
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


# ----------------------------------------------------------------------------------------------------------------------
_MAX_BYTES = 2**18
MAPPING = "<mapping>"  # the name in messages of a config that is not a file


def load_config(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Load a YAML file or a mapping. If overrides `section.key=value` repeat a key, the last one wins."""
    if isinstance(source, Mapping):
        return _checked(ParsedYaml(_plain(source), {(): Location(MAPPING)}), MAPPING, overrides)
    if not isinstance(source, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]  callers may be unchecked
        raise ConfigError(f"the config: got {type(source).__name__}, allowed: the path of a YAML file, or a mapping")
    return parse_config(read_text(Path(source)), source=str(source), overrides=overrides)


def parse_config(text: str, *, source: str = "<string>", overrides: Iterable[str] = ()) -> Config:
    """Load a config from a string. Messages call it `source`."""
    try:
        document = read_yaml(text, source)
    except BadYaml as error:
        raise ConfigError(redact(str(error.problem))) from None
    return _checked(document, source, overrides)


def _checked(document: ParsedYaml, source: str, overrides: Iterable[str]) -> Config:
    if document.data is None:
        raise ConfigError(f"{source}: is empty. `dualtune config` prints a commented default")
    if isinstance(document.data, dict):
        for override in overrides:
            _apply(override, document)
        config = _validate(document)
        if config and not document.problems:
            return with_usual_rate(config)
    elif document.data is not UNREADABLE:
        names = ", ".join(sections())
        document.problems.append(ConfigProblem(Location(source), (), f"must be a mapping with the sections {names}"))
    # In file order; then problems without a line: overrides and missing sections.
    problems = sorted(document.problems, key=lambda problem: problem.place.line or float("inf"))
    raise ConfigError(redact("\n".join(map(str, problems))))


def get_value(config: Config, key: str) -> Any:
    """Return the value of `section.key`, or a whole section."""
    value: Any = config
    path = tuple(key.split("."))
    for depth, part in enumerate(path):
        if isinstance(value, BaseModel) and part in type(value).model_fields:
            value = getattr(value, part)
        elif isinstance(value, dict) and part in value:
            value = cast(dict[str, Any], value)[part]
        elif isinstance(value, BaseModel):
            raise ConfigError(redact(f"{key}: {unknown_key(path[: depth + 1])}"))
        else:
            raise ConfigError(redact(f"{key}: there is no '{part}' in '{dotted(path[:depth])}'"))
    return value


def _plain(value: Any) -> Any:
    """Convert a value to plain YAML types; always a copy, because overrides are written into it."""
    match value:
        case Mapping():
            return {key: _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
        case list() | tuple():
            return [_plain(item) for item in cast(list[Any], value)]
        case Path():
            return str(value)
        case _:
            return value


def read_text(path: Path) -> str:
    """Return the text of a config file. ConfigError if it is missing, too large, or not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        nearest = did_you_mean_path(path)
        raise ConfigError(
            f"{path}: no such file{nearest or '. `dualtune config` prints a commented default'}"
        ) from None
    except IsADirectoryError:
        own = f". That of a run is {path / 'config.yaml'}" if (path / "config.yaml").is_file() else ""
        raise ConfigError(f"{path}: is a directory, must be a YAML file{own}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {_MAX_BYTES} bytes, too large for a config")
    try:
        return raw.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise ConfigError(f"{path}:{line}: {message}") from None


# --- Overrides -------------------------------------------------------------------------------------------------------


def _apply(override: str, document: ParsedYaml) -> None:
    """Set one key in the document, with the override as its place. Errors become problems of the document."""
    key, equals, text = override.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    place = Location(f"--set {dotted(parts)}")
    if not equals or not all(parts):
        message = "must have the form section.key=value, such as train.steps=100"
        document.problems.append(ConfigProblem(Location(f"--set {override}"), (), message))
        return
    try:
        value = read_yaml(text, place.source, with_lines=False)
    except BadYaml as error:
        document.problems.append(error.problem)
        return
    if value.data is None and text.strip().lower() not in ("null", "~"):  # --set train.steps=$UNSET
        document.problems.append(
            ConfigProblem(place, parts, "has no value; write null for none, '' for an empty string")
        )
        return
    document.problems += [ConfigProblem(place, (*parts, *path), message) for _, path, message in value.problems]

    # The section is made if it is absent; a value in its place is a problem of the override, not of the file.
    node = cast(dict[str, Any], document.data)
    for depth, part in enumerate(parts[:-1], start=1):
        if node.get(part) is None:
            node[part] = {}
            if depth > 1:  # a created top-level section still counts as missing in the file
                document.places[parts[:depth]] = place
        if not isinstance(node[part], dict):
            document.problems.append(
                ConfigProblem(place, parts, f"'{dotted(parts[:depth])}' is a value, not a section")
            )
            return
        node = node[part]
    # From now on a problem of this key is one of the override: the lines of the file do not say where it is.
    node[parts[-1]] = value.data
    for path in [path for path in document.places if path[: len(parts)] == parts]:
        del document.places[path]
    document.places[parts] = place


# --- Validation ------------------------------------------------------------------------------------------------------


def _validate(document: ParsedYaml) -> Config | None:
    """Return the config, or None and add at least one problem to the document."""
    data = cast(dict[str, Any], document.data)
    # A section that is absent, or empty because all its keys are commented out, gets the defaults.
    data |= {name: cast(Any, {}) for name in sections() if data.get(name) is None}
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = dict(_faults(error, data))
    faulty = [*faults, *(problem.path for problem in document.problems)]
    for path, message in (faults | _impossible_pairs(data, faulty)).items():
        document.problems.append(ConfigProblem(document.place(path), path, message))
    return None


def _faults(error: ValidationError, data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield path and message of each invalid key, in our words, because pydantic's messages are about types."""
    messages: dict[KeyPath, str] = {}
    for fault in error.errors(include_url=False, include_input=False):
        path, value = _follow(fault["loc"], data)
        match fault["type"]:
            case "extra_forbidden":
                messages[path] = unknown_key(path)
            case "missing":
                path = (*path, fault["loc"][-1])
                messages[path] = missing(path)
            case "impossible_pairs":
                continue
            case "refused":
                messages[path] = fault["msg"]
            case _:
                messages.setdefault(path, "" if value is UNREADABLE else wrong_value(path, value))
    # If one alternative of a union reports which part is wrong, drop what the others report about the whole value.
    outer = {path[:depth] for path in messages for depth in range(len(path))}
    yield from ((path, message) for path, message in messages.items() if message and path not in outer)


def _follow(location: KeyPath, data: Any) -> tuple[KeyPath, Any]:
    """Return the part of a location that exists in the data, and the value there.

    After the path of a union, a location contains the name of one of its alternatives, which could look like a key.
    """
    path: KeyPath = ()
    parts = iter(location)
    for part in parts:
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            data = cast(dict[str | int, Any], data)[part]
            path = (*path, part)
            if is_union(path):
                next(parts, None)
    return path, cast(Any, data)


def _impossible_pairs(data: dict[str, Any], faulty: Iterable[KeyPath]) -> dict[KeyPath, str]:
    """Find invalid pairs of keys. Pydantic checks pairs only if all keys are valid, so leave out the invalid ones."""
    ignored = {path[:2] for path in faulty}
    repaired = {
        section: example | {key: value for key, value in _keys(data[section]).items() if (section, key) not in ignored}
        for section, example in examples().items()
    }
    try:
        Config.model_validate(repaired)
    except ValidationError as error:
        pairs: list[tuple[KeyPath, KeyPath, str]] = error.errors()[0].get("ctx", {}).get("pairs", [])
        return {path: message for path, other, message in pairs if not ignored & {path, path[:1], other, other[:1]}}
    return {}


def _keys(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}
