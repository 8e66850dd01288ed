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

from dualtune.config.importing import axolotl, axolotl_rs, llama_factory, mlx_lm, trl, unsloth
from dualtune.config.importing.table import Given, ImportedConfig, Note, Rule, Setting, Untranslated, is_off, shown
from dualtune.config.load import read_text
from dualtune.config.reader import BadYaml, ParsedYaml, read_yaml
from dualtune.config.schema import sections
from dualtune.errors import ConfigError
from dualtune.text.redaction import redact

TRAINERS: dict[str, ModuleType] = {
    "axolotl": axolotl, "mlx-lm": mlx_lm, "LLaMA-Factory": llama_factory, "TRL": trl, "Unsloth": unsloth,
    "axolotl-rs": axolotl_rs,
}  # fmt: skip
_MLX_LM_KEYS = {"data", "hf_dataset", "iters", "lora_parameters", "num_layers", "fine_tune_type", "adapter_path"}
_LLAMA_FACTORY_KEYS = {
    "stage", "finetuning_type", "template", "cutoff_len", "dataset", "dataset_dir", "lora_rank", "lora_target",
    "quantization_bit",
}  # fmt: skip
_UNSLOTH_KEYS = {"data", "training", "lora", "logging", "inference"}
_MARKS = {  # of each trainer, for the error message
    "axolotl": "base_model", "axolotl-rs": f"base_model and one of {', '.join(axolotl_rs.SECTIONS)}",
    "LLaMA-Factory": "model_name_or_path and one of " + ", ".join(sorted(_LLAMA_FACTORY_KEYS)),
    "TRL": "model_name_or_path", "Unsloth": "training with lora or data",
    "mlx-lm": "model and one of " + ", ".join(sorted(_MLX_LM_KEYS)),
}  # fmt: skip


def import_config(
    path: Path, trainer: str | None = None, count_layers: Callable[[str], int | None] = lambda _: None
) -> ImportedConfig:
    """Translate a YAML file of a trainer (`None`: detect it). Raises ConfigError if there is no valid result.

    `count_layers` returns the number of layers of a model by name, or None if it is unknown.
    """
    _refuse_code(path)
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


def _refuse_code(path: Path) -> None:
    """Refuse a notebook or a script, which is never run, and name the page that helps to translate it by hand."""
    kind = {".ipynb": "a notebook", ".py": "a Python script", ".sh": "a shell script"}.get(path.suffix.lower())
    if kind is None:
        return
    text = read_text(path).lower()
    pages = {
        "unsloth": "unsloth",
        "llamafactory": "llama_factory",
        "mlx_lm": "mlx_lm",
        "axolotl": "axolotl",
        "trl": "trl",
    }
    page = next((f"docs/coming_from/{name}.md" for word, name in pages.items() if word in text), "docs/coming_from.md")
    raise ConfigError(
        f"{path}: is {kind}: code is not read or run, only YAML is translated. {page} sets its names and ours side by "
        "side; begin with `dualtune config > config.yaml`"
    )


def _detect(document: ParsedYaml, path: Path) -> str:
    """Return the trainer whose keys the file has."""
    keys = cast(dict[str, Any], document.data)
    if "base_model" in keys:
        return "axolotl-rs" if axolotl_rs.is_in_sections(keys) else "axolotl"
    if "model_name_or_path" in keys:
        return "LLaMA-Factory" if _LLAMA_FACTORY_KEYS & keys.keys() else "TRL"
    if isinstance(keys.get("training"), dict) and _UNSLOTH_KEYS & (keys.keys() - {"training"}):
        return "Unsloth"
    if not isinstance(keys.get("model"), dict) and _MLX_LM_KEYS & keys.keys():
        return "mlx-lm"
    if keys.keys() <= sections().keys():
        raise ConfigError(f"{path}: is already a config of dualtune; `dualtune check-config` checks it")
    marks = "; ".join(f"{name} has {mark}" for name, mark in _MARKS.items())
    raise ConfigError(
        f"{path}: is not recognized as a config of {' or '.join(TRAINERS)} ({marks}); choose one with --from"
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
        if key in split and isinstance(value, dict) and value:
            yield from ((f"{key}.{inner}", each) for inner, each in cast(dict[str, Any], value).items())
        else:
            yield key, value


_SECRET = re.compile(r"(api_?key|secret|password|(auth|hub|hf|wandb)_token)\Z")


def _record(key: str, value: Any, rules: tuple[Rule, ...], result: ImportedConfig) -> None:
    """Record a key that no setting or conversion has mentioned."""
    rule = next((rule for rule in rules if rule.knows(key)), None)
    comments = (setting.comment for setting in result.settings)
    left = (each.key for each in result.lost + result.needless)
    mention = re.compile(rf"(?<![\w.]){re.escape(key)}(?!\w)")  # the whole name: lora_r is not in lora_rank
    if any(mention.search(text) for text in (*comments, *left)):
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
