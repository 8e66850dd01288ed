"""Translate another trainer's file to our config, and name every key that is not translated.

The file is untrusted: our config reader with its limits reads it, our loader validates the resulting config, and
comments are one line without control characters.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dualtune.base.errors import ConfigError
from dualtune.base.redaction import redact
from dualtune.base.text import one_line
from dualtune.config.importing import axolotl, axolotl_rs, llama_factory, mlx_lm, mlx_lm_lora, trl, unsloth
from dualtune.config.importing.table import (
    ForeignFile,
    ImportedConfig,
    Note,
    Rule,
    Setting,
    Untranslated,
    is_off,
    shown,
)
from dualtune.config.load import MAPPING, BadYaml, load_config, parse_config, read_text, read_yaml
from dualtune.config.render import entry
from dualtune.config.schema import sections
from dualtune.model.targets import ALL_LINEAR

# ----------------------------------------------------------------------------------------------------------------------
# Write a translated config as text: first what was not translated, then our keys with their origin.


def to_text(imported: ImportedConfig) -> str:
    """Return the config as YAML with comments. Raises ConfigError, with the foreign keys, if our loader rejects it."""
    settings: dict[str, dict[str, Setting]] = {section: {} for section in sections()}
    for setting in imported.settings:
        section, _, key = setting.key.partition(".")
        settings[section][key] = setting

    # First the values alone: an error about one of them names the foreign key that it comes from.
    try:
        load_config({section: {key: line.value for key, line in keys.items()} for section, keys in settings.items()})
    except ConfigError as error:
        origins = {setting.key: setting.comment for setting in imported.settings}
        problems = [_with_origin(line, origins) for line in str(error).splitlines()]
        head = f"{imported.source}: as a config of {imported.trainer}, it has values that are not allowed here"
        raise ConfigError("\n".join([f"{head}; change them in that file and import again:", *problems])) from None

    lines = [
        f"# Translated from {one_line(imported.source)}, a config of {imported.trainer}, by `dualtune config import`."
    ]
    for title, untranslated in (
        ("Not translated; the result differs, or may differ:", imported.lost),
        ("Not needed here:", imported.needless),
    ):
        lines += ["#", f"# {title}"] if untranslated else []
        for row in untranslated:
            lines.append(f"#   {one_line(row.key)}: {one_line(row.value)}")
            lines += textwrap.wrap(one_line(row.reason), 120, initial_indent="#     ", subsequent_indent="#     ")
    for section, keys in settings.items():
        lines += ["", f"{section}:"] if keys else []
        for key, setting in keys.items():
            lines.append(entry(key, setting.value) + (f"  # {one_line(setting.comment)}" if setting.comment else ""))
    text = "\n".join(lines) + "\n"
    parse_config(text)  # the comments are foreign too: they must not have become keys
    return text


def _with_origin(line: str, origins: dict[str, str]) -> str:
    message = line.removeprefix(f"{MAPPING}: ")
    key = re.match(r"\w+\.\w+", message)
    origin = origins.get(key[0]) if key else None
    return f"  {message} (from {origin})" if origin else f"  {message}"


# ----------------------------------------------------------------------------------------------------------------------
TRAINERS: dict[str, ModuleType] = {
    "axolotl": axolotl, "mlx-lm": mlx_lm, "LLaMA-Factory": llama_factory, "TRL": trl, "Unsloth": unsloth,
    "axolotl-rs": axolotl_rs, "mlx-lm-lora": mlx_lm_lora,
}  # fmt: skip
_MLX_LM_KEYS = {"data", "hf_dataset", "iters", "lora_parameters", "num_layers", "fine_tune_type", "adapter_path"}
_MLX_LM_LORA_KEYS = {
    "train_type", "train_mode", "load_in_4bits", "load_in_6bits", "load_in_8bits", "load_in_mxfp4", "dpo_cpo_loss_type",
    "reference_model_path",
}  # fmt: skip
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
    "mlx-lm-lora": "one of " + ", ".join(sorted(_MLX_LM_LORA_KEYS)),
}  # fmt: skip


# Keys of `adapter` that an adapter to go on from decides.
_OF_THE_START = ("layers", "init", "train_modules", "train_rows")


def import_config(
    path: Path, trainer: str | None = None, count_layers: Callable[[str], int | None] = lambda _: None
) -> ImportedConfig:
    """Translate a YAML file of a trainer (`None`: detect it). Raises ConfigError if there is no valid result.

    `count_layers` returns the number of layers of a model by name, or None if it is unknown.
    """
    _refuse_code(path)
    try:
        document = read_yaml(read_text(path), str(path))
    except BadYaml as error:
        raise ConfigError(redact(str(error.problem))) from None
    if document.problems:
        raise ConfigError(redact("\n".join(map(str, document.problems))))
    data: object = document.data
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of keys, as a config of {' or '.join(TRAINERS)} is")

    # The rules are asked in order, also for keys that the file lacks: the other trainer's defaults are not ours.
    keys = cast(dict[str, Any], data)
    name = trainer or _detect(keys, path)
    module = TRAINERS[name]
    rules, defaults = cast(tuple[Rule, ...], module.RULES), cast(dict[str, Any], module.DEFAULTS)
    file = ForeignFile(document, name, defaults, count_layers)
    settings: dict[str, Setting] = {}  # of two rules for one of our keys, the last one decides
    for rule in rules:
        for key, value in rule.convert(file).items() if rule.convert else ():
            note = value if isinstance(value, Note) else file.note(value, *rule.names)
            settings[key] = Setting(key, note.value, note.comment)
    if (method := settings.get("adapter.method")) and method.value == "full":
        settings.pop("adapter.dropout", None)  # an objective turned off what there is none of
    if "adapter.init_from" in settings:  # there, too, the adapter says what is trained
        for key in _OF_THE_START:
            settings.pop(f"adapter.{key}", None)
        if (targets := settings.get("adapter.targets")) and targets.value == ALL_LINEAR:
            del settings["adapter.targets"]

    # What no setting and no list mentions by now would be lost in silence.
    result = ImportedConfig(name, str(path), [*settings.values()], file.lost, file.needless)
    for key, value in _keys(keys, rules):
        _record(key, value, rules, result)
    return result


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


def _detect(keys: dict[str, Any], path: Path) -> str:
    """Return the trainer whose keys the file has."""
    if "base_model" in keys:
        return "axolotl-rs" if axolotl_rs.is_in_sections(keys) else "axolotl"
    if "model_name_or_path" in keys:
        return "LLaMA-Factory" if _LLAMA_FACTORY_KEYS & keys.keys() else "TRL"
    if isinstance(keys.get("training"), dict) and _UNSLOTH_KEYS & (keys.keys() - {"training"}):
        return "Unsloth"
    if _MLX_LM_LORA_KEYS & keys.keys():
        return "mlx-lm-lora"
    if not isinstance(keys.get("model"), dict) and _MLX_LM_KEYS & keys.keys():
        return "mlx-lm"
    if keys.keys() <= sections().keys():
        raise ConfigError(f"{path}: is already a config of dualtune; `dualtune check-config` checks it")
    marks = "; ".join(f"{name} has {mark}" for name, mark in _MARKS.items())
    raise ConfigError(
        f"{path}: is not recognized as a config of {' or '.join(TRAINERS)} ({marks}); choose one with --from"
    )


def _keys(data: dict[str, Any], rules: tuple[Rule, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of the file. A mapping with rules for its parts is split into them."""
    split = {name.partition(".")[0] for rule in rules for name in rule.names if "." in name}
    for key, value in data.items():
        if key in split and isinstance(value, dict) and value:
            yield from ((f"{key}.{inner}", part) for inner, part in cast(dict[str, Any], value).items())
        else:
            yield key, value


_SECRET = re.compile(r"(api_?key|secret|password|(auth|hub|hf|wandb)_token)\Z")


def _record(key: str, value: Any, rules: tuple[Rule, ...], result: ImportedConfig) -> None:
    """Record a key that no setting or conversion has mentioned."""
    mention = re.compile(rf"(?<![\w.]){re.escape(key)}(?!\w)")  # the whole name: lora_r is not in lora_rank
    comments = (setting.comment for setting in result.settings)
    recorded = (row.key for row in (*result.lost, *result.needless))
    if any(mention.search(text) for text in (*comments, *recorded)):
        return
    rule = next((rule for rule in rules if rule.matches(key)), None)
    if _SECRET.search(key) and isinstance(value, str):
        value = "(not shown)"
    is_needless, reason = False, f"unknown; look it up in the reference of {result.trainer}"
    if is_off(value):
        is_needless, reason = True, "it is turned off"
    elif rule is not None and rule.convert is not None:
        is_needless, reason = True, "it is the default here, or another key decides"
    elif rule is not None:
        see = f"; see {rule.keys}" if rule.keys and rule.keys not in rule.note else ""
        is_needless, reason = rule.is_needless, f"{rule.note}{see}"
    (result.needless if is_needless else result.lost).append(Untranslated(key, shown(value), reason))
