"""Render configs as text: the commented default, a resolved config and the JSON schema, all from the schema."""

from __future__ import annotations

import copy
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dualtune.base.errors import ConfigError
from dualtune.config.data_section import SourceConfig
from dualtune.config.load import PLAIN_SCALARS, parse_config
from dualtune.config.rates import usual_rate
from dualtune.config.schema import Config
from dualtune.config.values import ON_POLICY, POLICY_OBJECTIVES
from dualtune.config.words import config_schema, describe, examples, fragment


def default_yaml(overrides: Iterable[str] = ()) -> str:
    """Return the default config: each key with its description and allowed values; required keys have examples.

    With `overrides` (`section.key=value`) it has these values, and, unless they say otherwise, those that go with
    them: the usual learning rate, and what training on samples needs. ConfigError as for a config with them.
    """
    overrides = [*overrides]
    if not overrides:
        return _commented(examples(), ())
    chosen = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    objective = chosen.get("train.objective")
    needed = ["adapter.dropout=0"] if objective in (*POLICY_OBJECTIVES, ON_POLICY) else []
    if objective in POLICY_OBJECTIVES and "rollouts.environment" not in chosen:
        needed.append("rollouts.rewards=[exact]")
    config = parse_config(_commented(examples(), ()), source="the default config", overrides=[*needed, *overrides])
    usual, values = usual_rate(config), config.model_dump()
    if usual is None or "train.learning_rate" in chosen:
        return _commented(values, ())
    values["train"]["learning_rate"] = usual.rate
    return _commented(values, usual.reasons)


def _commented(values: Mapping[str, Mapping[str, Any]], reasons: Sequence[str]) -> str:
    """Return every key with these values, or else its default. `reasons`: of the learning rate."""
    lines = ["# Every key of a dualtune config, with its default. Paths are relative to the current directory."]
    for section in config_schema()["properties"]:
        node = fragment((section,))
        lines += ["", f"# {node['description']}"]
        if section == "data":
            keys = SourceConfig.model_fields.items()
            lines += [
                "# Where data is a mapping, it has the keys:",
                *(f"#   {key}: {field.description}" for key, field in keys),
            ]
        lines += [f"{section}:"]
        for key, inner in node["properties"].items():
            is_required = key in examples()[section]
            comment = f"{inner['description']} {'Required' if is_required else 'Allowed'}: {describe(inner)}."
            if key == "learning_rate" and reasons:
                comment += f" Less than for LoRA on plain targets: {'; '.join(reasons)}."
            lines += textwrap.wrap(comment, 120, initial_indent="  # ", subsequent_indent="  # ")
            lines += [entry(key, values[section].get(key, inner.get("default")))]
    return "\n".join(lines) + "\n"


def to_yaml(config: Config) -> str:
    """Return the config with every key written out; parse_config reads it back unchanged."""
    lines: list[str] = []
    for section, values in config.model_dump().items():
        lines += [f"{section}:", *(entry(key, value) for key, value in values.items())]
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config, for editors and other programs."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **copy.deepcopy(config_schema())}


class _Dumper(yaml.SafeDumper):
    """Quotes strings that our reader (`1e-4`) or a YAML 1.1 reader (`on`, `1:30`) would read as another type."""


for _kind, (_pattern, _) in PLAIN_SCALARS.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, None)  # pyright: ignore[reportUnknownMemberType]


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    is_whole = value.is_integer() and abs(value) < 2**53
    return dumper.represent_int(int(value)) if is_whole else dumper.represent_float(value)  # 32 reads better than 32.0


_Dumper.add_representer(float, _number)


def entry(key: str, value: object) -> str:
    """Return one line of a section."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=sys.maxsize, sort_keys=False
    )
    text = text.removesuffix("...\n").rstrip("\n")  # PyYAML adds it after a bare scalar
    return f"  {key}: {text}"


# ----------------------------------------------------------------------------------------------------------------------
# The example configs: `configs/` in a clone, included in the wheel beside the code.


def example_names() -> list[str]:
    """Return the names of the examples, sorted."""
    return sorted(path.stem for path in _directory().glob("*.yaml"))


def example_path(name: str) -> Path:
    """Return the file of an example, named with or without `.yaml`. Raises ConfigError for an unknown name."""
    names = example_names()
    if (stem := name.removesuffix(".yaml")) not in names:
        raise ConfigError(f"example config: got '{name}', allowed: {', '.join(names)}")
    return _directory() / f"{stem}.yaml"


def title(path: Path) -> str:
    """Return the first sentence of the first comment, which is the purpose of the example."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip().partition(". ")[0].rstrip(".")


def _directory() -> Path:
    package = Path(__file__).parents[1]
    in_wheel = package / "configs"
    return in_wheel if in_wheel.is_dir() else package.parent / "configs"
