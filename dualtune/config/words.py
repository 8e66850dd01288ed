"""The schema in words: the allowed values of a key, for error messages and the comments of the default config."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, cast

from dualtune.base.redaction import redact
from dualtune.config.advice import unknown_value
from dualtune.config.schema import Config
from dualtune.config.values import KeyPath, dotted

Fragment = dict[str, Any]  # a part of a JSON schema

_FORMATS = {
    "columns": "a mapping from our column names to the file's",
    "variables": "a mapping from names to JSON values, such as {enable_thinking: false}",
    "arguments": "a mapping from names to JSON values, such as {difficulty: 2}",
    "model": "a hub id, a directory or a GGUF file",
    "modules": "a list of different module names, such as [q_proj, v_proj]",
    "name": "a name",
    "names": "a list of different names, which may be empty",
    "path": "a path",
    "prompt": "a text of at most 4000 characters",
    "prompts": "a list of at most 8 texts",
    "stop texts": "a list of at most 8 texts",
    "numbers": "a list of numbers",
    "roles": "a mapping from names to system, user, assistant or tool, such as {critic: user}",
    "sources": "a list of these",
    "texts": "a list of different texts, which may be empty",
    "tokens": "a list of different tokens, by id or text, which may be empty",
    "trackers": "a list of trackio, wandb, mlflow and tensorboard, which may be empty",
    "ranks": "a mapping from module names to ranks, such as {down_proj: 32}",
    "alphas": "a mapping from module names to alphas, such as {down_proj: 64}",
    "layers": "all, first N, last N, or numbers and ranges such as 0,4-11",
    "size": "a size such as 12GB or 12GiB",
}
_TYPES = {
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "string": "a string",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@cache
def config_schema() -> Fragment:
    """Return the JSON schema of the config. It is shared: copy it before changing it."""
    return Config.model_json_schema()


def fragment(path: KeyPath) -> Fragment:
    """Return the JSON schema of a section, a key, or an item of a list or mapping; empty for an unknown key."""
    node = config_schema()
    for part in path:
        node = _resolve(_inner(node, part))
    return node


def _inner(node: Fragment, part: str | int) -> Fragment:
    kind = "items" if isinstance(part, int) else "additionalProperties"
    options = [_resolve(option) for option in cast(list[Fragment], node.get("anyOf", [node]))]
    inner = (option.get("properties", {}).get(part) or option.get(kind) for option in options)
    return next(filter(None, inner), Fragment())


def _resolve(node: Fragment) -> Fragment:
    return config_schema()["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def is_union(path: KeyPath) -> bool:
    """Return whether a key allows several kinds of values, not counting null."""
    return sum(option.get("type") != "null" for option in fragment(path).get("anyOf", [])) > 1


def describe(node: Fragment) -> str:
    """Describe the allowed values: `auto, float32 or float16`, `an integer >= 1`, `a number > 0 or null`."""
    *head, last = _alternatives(node)
    comma = "," if any(" and " in words for words in head) else ""
    return f"{', '.join(head)}{comma} or {last}" if head else last


def _alternatives(node: Fragment) -> list[str]:
    if "anyOf" in node:
        return [words for option in node["anyOf"] for words in _alternatives(option)]
    if names := choices(node):
        return names
    if "$ref" in node:
        return [f"a mapping (keys: {', '.join(_resolve(node)['properties'])})"]
    if "properties" in node:
        return [f"a section (keys: {', '.join(node['properties'])})"]
    noun = _FORMATS.get(node.get("format", "")) or _TYPES[node["type"]]
    return [" ".join(filter(None, [noun, _bounds(node)]))]


def choices(node: Fragment) -> list[str]:
    """Return the fixed names that a key allows; it may allow other values too."""
    own = [node["const"]] if "const" in node else cast(list[str], node.get("enum", []))
    return own + [name for option in node.get("anyOf", []) for name in choices(option)]


def _bounds(node: Fragment) -> str:
    bounds = [(sign, node[name]) for name, sign in _BOUNDS.items() if name in node]
    return " and ".join(f"{sign} {f'{bound:g}' if isinstance(bound, float) else bound}" for sign, bound in bounds)


def wrong_value(path: KeyPath, value: object) -> str:
    """Return the message for an invalid value: the value, and what is allowed."""
    node, names, got = fragment(path), choices(fragment(path)), f"got {show(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{got}, must be finite"
    if "enum" in node:
        message = f"{got}, allowed: {', '.join(names)}"
    elif _bounds(node) and _has_type(value, node["type"]):
        message = f"{got}, must be {_bounds(node)}"
    else:
        message = f"{got}, must be {describe(node)}"
    word = value if isinstance(value, str) else show(value) if value is None or isinstance(value, bool) else ""
    advice = unknown_value(word, names)
    return f"{message}. {advice}" if advice else message


def _has_type(value: object, kind: str) -> bool:
    return not isinstance(value, bool) and isinstance(value, int if kind == "integer" else int | float)


def missing(path: KeyPath) -> str:
    """Return the message for a missing required key."""
    node = fragment(path)
    example = f"{path[-1]}: {node['examples'][0]}"
    return f"missing; '{dotted(path[:-1])}' needs it: {describe(node)}, such as `{example}`"


def show(value: object) -> str:
    """Format a value as in YAML, shortened."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value).replace("inf", ".inf").replace("nan", ".nan")
    text = redact(repr(value))  # before shortening, which could leave part of a secret
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


@cache
def examples() -> dict[str, dict[str, Any]]:
    """Return the example value of each required key, by section."""
    return {
        section: {key: fragment((section, key))["examples"][0] for key in fragment((section,)).get("required", [])}
        for section in config_schema()["properties"]
    }
