"""Translate another trainer's file to our config, and name every key that is not translated.

The file is untrusted: our config reader with its limits reads it, our loader validates the resulting config, and
comments are one line without control characters.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dualtune.base.errors import ConfigError
from dualtune.base.redaction import redact
from dualtune.base.text import one_line
from dualtune.config.importing import axolotl, axolotl_rs, llama_factory, mlx_lm, trl, unsloth
from dualtune.config.importing.table import Given, ImportedConfig, Note, Rule, Setting, Untranslated, is_off, shown
from dualtune.config.load import MAPPING, BadYaml, ParsedYaml, load_config, parse_config, read_text, read_yaml
from dualtune.config.render import entry
from dualtune.config.schema import sections

# ----------------------------------------------------------------------------------------------------------------------
# What is written in Python: tables of names of other trainers and ours, for reading only.

# (their names, our keys, what differs)
TRL = (
    ("SFTConfig, ModelConfig", "", "the names of the table above"),
    ("LoraConfig.r, lora_alpha, lora_dropout", "adapter.rank, adapter.alpha, adapter.dropout", ""),
    ("LoraConfig.target_modules", "adapter.targets", "`all-linear`, or a list of names"),
    ("train_dataset, eval_dataset", "data.train, data.eval", "a name, a file or a directory"),
    ("merge_and_unload", "", "`dualtune export RUN --to hf`; also `gguf`, `ollama`, `lmstudio` and `mlx`"),
    ("push_to_hub", "", "`dualtune push hf://owner/name RUN --adapter`: the adapter and a model card"),
    ("transformers chat, transformers serve", "", "`dualtune chat`, `dualtune serve`"),
    ("compute_metrics", "", "`dualtune eval`, after the run"),
    ("DPOTrainer, GRPOTrainer and others", "", "not supported yet"),
)  # fmt: skip

UNSLOTH = (
    ("FastLanguageModel.from_pretrained(model_name)", "model.name", ""),
    ("max_seq_length", "data.max_length", ""),
    ("load_in_4bit", "model.quantization", "`nf4`; it is off by default here"),
    ("get_peft_model(r, lora_alpha, lora_dropout)", "adapter.rank, adapter.alpha, adapter.dropout", ""),
    ("target_modules", "adapter.targets", ""),
    ("use_rslora", "adapter.scaling", "`rank_stabilized`"),
    ("use_gradient_checkpointing", "memory.checkpointing", "`full`; by default as little as fits"),
    ("random_state", "run.seed", ""),
    ("get_chat_template", "data.template", "the tokenizer's own, a name such as `qwen-2.5`, or a Jinja file"),
    ("train_on_responses_only", "data.loss_on", "`assistant`, by default"),
    ("the arguments of SFTConfig", "", "see TRL"),
    ("save_pretrained_merged", "", "`dualtune export RUN --to hf`, or `dualtune adapter merge`"),
    ("save_pretrained_gguf", "", "`dualtune export RUN --to gguf --quantize q4_k_m`; also `ollama` and `lmstudio`"),
    ("push_to_hub, push_to_hub_merged, push_to_hub_gguf", "",
     "`dualtune push hf://owner/name RUN --adapter` publishes the adapter; a merged model or a GGUF: `hf upload`"),
    ("report_to", "run.track", "trackio, wandb, mlflow, tensorboard; W&B is offline by default"),
    ("for_inference, fast_generate", "", "`dualtune chat`, `dualtune generate`, `dualtune serve`"),
)  # fmt: skip

OTHERS = {"TRL-in-Python": TRL, "Unsloth-in-Python": UNSLOTH}

# ----------------------------------------------------------------------------------------------------------------------
# Write a translated config as text: first what was not translated, then our keys with their origin.


def to_text(imported: ImportedConfig) -> str:
    """Return the config as YAML with comments. Raises ConfigError, with the foreign keys, if our loader rejects it."""
    _check(imported)
    source = one_line(imported.source)
    lines = [f"# Translated from {source}, a config of {imported.trainer}, by `dualtune config import`."]
    lines += _named("Not translated; the result differs, or may differ:", imported.lost)
    lines += _named("Not needed here:", imported.needless)
    for section in sections():
        found = [setting for setting in imported.settings if setting.key.partition(".")[0] == section]
        if found:
            lines += ["", f"{section}:"]
        for setting in found:
            comment = f"  # {one_line(setting.comment)}" if setting.comment else ""
            lines.append(entry(setting.key.partition(".")[2], setting.value) + comment)
    text = "\n".join(lines) + "\n"
    parse_config(text)  # validates the final text
    return text


def _named(title: str, keys: list[Untranslated]) -> Iterator[str]:
    if keys:
        yield from ("#", f"# {title}")
    for each in keys:
        yield f"#   {one_line(each.key)}: {one_line(each.value)}"
        yield from textwrap.wrap(one_line(each.reason), 120, initial_indent="#     ", subsequent_indent="#     ")


def _check(imported: ImportedConfig) -> None:
    nested: dict[str, dict[str, object]] = {}
    for setting in imported.settings:
        section, _, key = setting.key.partition(".")
        nested.setdefault(section, {})[key] = setting.value
    try:
        load_config(nested)
    except ConfigError as error:
        origins = {setting.key: setting.comment for setting in imported.settings}
        lines = [_with_origin(line, origins) for line in str(error).splitlines()]
        problem = f"{imported.source}: as a config of {imported.trainer}, it has values that are not allowed here"
        raise ConfigError("\n".join([f"{problem}; change them in that file and import again:", *lines])) from None


def _with_origin(line: str, origins: dict[str, str]) -> str:
    message = line.removeprefix(f"{MAPPING}: ")
    key = re.match(r"\w+\.\w+", message)
    origin = origins.get(key[0]) if key else None
    return f"  {message} (from {origin})" if origin else f"  {message}"


# ----------------------------------------------------------------------------------------------------------------------
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


# ----------------------------------------------------------------------------------------------------------------------
# Generate the tables of docs/coming_from/ from the translation rules that name a key of ours.

_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)


def with_tables(page: str) -> str:
    """Return the page with each table between its marks regenerated."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2])}\n{found[3]}", page)


def _table(name: str) -> str:
    if name in OTHERS:
        rows = ((_in_code(theirs), _in_code(ours), note) for theirs, ours, note in OTHERS[name])
    else:
        rules = cast(tuple[Rule, ...], TRAINERS[name].RULES)
        rows = (_row(rule) for rule in sorted(rules, key=_is_lost) if _has_ours(rule))
    return "\n".join([f"| {name} | dualtune | |", "|---|---|---|", *_lines(rows)])


def _has_ours(rule: Rule) -> bool:
    """Whether a page names the rule: `dualtune config import` reports the others, with their reason."""
    return bool(rule.convert or (rule.ours and not rule.is_needless))


def _is_lost(rule: Rule) -> bool:
    return not rule.convert


def _row(rule: Rule) -> tuple[str, str, str]:
    word = "not translated: " if _is_lost(rule) else ""
    return _in_code(", ".join(rule.names)), _in_code(rule.ours), word + rule.note


def _lines(rows: Iterable[tuple[str, str, str]]) -> Iterable[str]:
    escaped = ((cell.replace("|", "\\|") for cell in row) for row in rows)
    return (f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in escaped)


def _in_code(names: str) -> str:
    """Format each of the names as code."""
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else ""
