"""Config -> text: the commented default, a resolved config, the JSON schema. All of it follows from the schema."""

from __future__ import annotations

import copy
import sys
import textwrap
from typing import Any

import yaml

from dualtune.config.reader import PLAIN_SCALARS
from dualtune.config.schema import Config, SourceConfig
from dualtune.config.words import config_schema, describe, examples, fragment


def default_yaml() -> str:
    """Every key with its default, what it means and what it allows. Required keys have an example value."""
    lines = ["# Every key of a dualtune config, with its default. Paths are relative to the current directory."]
    for section in config_schema()["properties"]:
        node = fragment((section,))
        lines += ["", f"# {node['description']}"]
        if section == "data":
            keys = SourceConfig.model_fields.items()
            lines += ["# Where it is a mapping:", *(f"#   {key}: {field.description}" for key, field in keys)]
        lines += [f"{section}:"]
        for key, inner in node["properties"].items():
            is_required = key in examples()[section]
            comment = f"{inner['description']} {'Required' if is_required else 'Allowed'}: {describe(inner)}."
            lines += textwrap.wrap(comment, 120, initial_indent="  # ", subsequent_indent="  # ")
            lines += [entry(key, examples()[section][key] if is_required else inner["default"])]
    return "\n".join(lines) + "\n"


def to_yaml(config: Config) -> str:
    """The config with every key written out; parse_config gives it back unchanged."""
    lines: list[str] = []
    for section, values in config.model_dump().items():
        lines += [f"{section}:", *(entry(key, value) for key, value in values.items())]
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config, for editors and other programs."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **copy.deepcopy(config_schema())}


class _Dumper(yaml.SafeDumper):
    """Quotes a string that would be read as something else, by us (`1e-4`) or by a YAML 1.1 reader (`on`, `1:30`)."""


for _kind, (_pattern, _) in PLAIN_SCALARS.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, None)  # pyright: ignore[reportUnknownMemberType]


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    is_whole = value.is_integer() and abs(value) < 2**53
    return dumper.represent_int(int(value)) if is_whole else dumper.represent_float(value)  # 32 reads better than 32.0


_Dumper.add_representer(float, _number)


def entry(key: str, value: object) -> str:
    """One line of a section."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=sys.maxsize, sort_keys=False
    )
    text = text.removesuffix("...\n").rstrip("\n")  # PyYAML closes a document that is a bare scalar
    return f"  {key}: {text}"
