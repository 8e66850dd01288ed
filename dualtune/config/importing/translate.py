"""Translate another trainer's file to our config, and name every key that is not translated.

The file is untrusted: our config reader with its limits reads it, our loader validates the resulting config, and
comments are one line without control characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dualtune.config.importing import axolotl, mlx_lm
from dualtune.config.importing.table import Given, ImportedConfig, Note, Rule, Setting, Untranslated, is_off, shown
from dualtune.config.load import read_text
from dualtune.config.reader import BadYaml, ParsedYaml, read_yaml
from dualtune.config.schema import sections
from dualtune.errors import ConfigError
from dualtune.text.redaction import redact

TRAINERS: dict[str, ModuleType] = {"axolotl": axolotl, "mlx-lm": mlx_lm}
_MLX_LM_KEYS = {"data", "hf_dataset", "iters", "lora_parameters", "num_layers", "fine_tune_type", "adapter_path"}


def import_config(
    path: Path, trainer: str | None = None, count_layers: Callable[[str], int | None] = lambda _: None
) -> ImportedConfig:
    """Translate a YAML file of a trainer (`None`: detect it). Raises ConfigError if there is no valid result.

    `count_layers` returns the number of layers of a model by name, or None if it is unknown.
    """
    document = _read(path)
    name = trainer or _detect(document, path)
    module = TRAINERS[name]
    rules, defaults = cast(tuple[Rule, ...], module.RULES), cast(dict[str, Any], module.DEFAULTS)
    given = Given(document, name, defaults)
    model = given.get("model" if name == "mlx-lm" else "base_model")
    given.num_layers = count_layers(model) if isinstance(model, str) else None
    result = ImportedConfig(name, str(path))
    found = (setting for rule in rules if rule.convert is not None for setting in _settings(rule, given))
    result.settings = list({setting.key: setting for setting in found}.values())  # of duplicate keys, the last one
    result.lost, result.needless = given.lost, given.needless
    for key, value in _keys(cast(dict[str, Any], document.data), rules):
        _record(key, value, rules, result)
    return result


def _read(path: Path) -> ParsedYaml:
    try:
        document = read_yaml(read_text(path), str(path))
    except BadYaml as error:
        raise ConfigError(redact(str(error.problem))) from None
    if document.problems:
        raise ConfigError(redact("\n".join(map(str, document.problems))))
    if not isinstance(document.data, dict):
        raise ConfigError(f"{path}: must be a mapping of keys, as a config of {' or '.join(TRAINERS)} is")
    return document


def _detect(document: ParsedYaml, path: Path) -> str:
    keys = cast(dict[str, Any], document.data)
    if "base_model" in keys:
        return "axolotl"
    if not isinstance(keys.get("model"), dict) and _MLX_LM_KEYS & keys.keys():
        return "mlx-lm"
    if keys.keys() <= sections().keys():
        raise ConfigError(f"{path}: is already a config of dualtune; `dualtune check-config` checks it")
    raise ConfigError(
        f"{path}: is not recognized as a config of {' or '.join(TRAINERS)} (axolotl has base_model, mlx-lm has "
        f"model and {', '.join(sorted(_MLX_LM_KEYS))}); choose one with --from"
    )


def _settings(rule: Rule, given: Given) -> Iterator[Setting]:
    assert rule.convert is not None
    for key, value in rule.convert(given).items():
        note = value if isinstance(value, Note) else given.note(value, *rule.names)
        yield Setting(key, note.value, note.comment)


def _keys(data: dict[str, Any], rules: tuple[Rule, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of the file. A mapping with rules for its parts is split into them."""
    split = {name.partition(".")[0] for rule in rules for name in rule.names if "." in name}
    for key, value in data.items():
        if key in split and isinstance(value, dict):
            yield from ((f"{key}.{inner}", each) for inner, each in cast(dict[str, Any], value).items())
        else:
            yield key, value


_SECRET = re.compile(r"(api_?key|secret|password|auth_token)\Z")


def _record(key: str, value: Any, rules: tuple[Rule, ...], result: ImportedConfig) -> None:
    """Record a key that no setting or conversion has mentioned."""
    rule = next((rule for rule in rules if rule.knows(key)), None)
    comments = (setting.comment for setting in result.settings)
    left = (each.key for each in result.lost + result.needless)
    if any(key in text for text in (*comments, *left)):
        return
    if _SECRET.search(key) and isinstance(value, str):
        value = "(not shown)"
    if is_off(value):
        result.needless.append(Untranslated(key, shown(value), "it is turned off"))
    elif rule is not None and rule.convert is not None:
        result.needless.append(Untranslated(key, shown(value), "it changes nothing, given the other keys"))
    elif rule is None:
        result.lost.append(Untranslated(key, shown(value), f"unknown; look it up in the reference of {result.trainer}"))
    else:
        reason = f"{rule.note}; see {rule.ours}" if rule.ours else rule.note
        (result.needless if rule.is_needless else result.lost).append(Untranslated(key, shown(value), reason))
