"""Load a config file with `--set` overrides. One ConfigError names all problems at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from dualtune.config.advice import unknown_key
from dualtune.config.problem import ConfigProblem, KeyPath, Location, dotted
from dualtune.config.reader import UNREADABLE, BadYaml, ParsedYaml, read_yaml
from dualtune.config.schema import Config, sections
from dualtune.config.words import examples, is_union, missing, wrong_value
from dualtune.errors import ConfigError
from dualtune.text.redaction import redact

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
            return config
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
            return {key: _plain(each) for key, each in cast(Mapping[Any, Any], value).items()}
        case list() | tuple():
            return [_plain(each) for each in cast(list[Any], value)]
        case Path():
            return str(value)
        case _:
            return value


def read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. `dualtune config` prints a commented default") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, must be a YAML file") from None
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
    node[parts[-1]] = value.data
    for path in [path for path in document.places if path[: len(parts)] == parts]:
        del document.places[path]
    document.places[parts] = place


# --- Validation ------------------------------------------------------------------------------------------------------


def _validate(document: ParsedYaml) -> Config | None:
    """Return the config, or None and add at least one problem to the document."""
    given = cast(dict[str, Any], document.data)
    # A section that is absent, or empty because all its keys are commented out, gets the defaults.
    empty: dict[str, Any] = {name: {} for name in sections() if given.get(name) is None}
    data = given | empty
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        found = dict(_faults(error, data))
    faulty = [*found, *(problem.path for problem in document.problems)]
    for path, message in (found | _impossible_pairs(data, faulty)).items():
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
