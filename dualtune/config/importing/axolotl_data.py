"""Translate axolotl's `datasets`, `test_datasets`, `val_set_size` and `chat_template`."""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing.arguments import variables_in
from dualtune.config.importing.table import Given, Note, Settings, is_off

_FORMATS = {
    "alpaca": "alpaca", "completion": "text", "pretrain": "text", "sharegpt": "sharegpt",
    "chat_template": "messages", "chat_template.default": "messages",
}  # fmt: skip
_OWN_TYPE = {"field_instruction": "instruction", "field_input": "input", "field_output": "output",
             "field_system": "system"}  # fmt: skip
_READ = {"path", "name", "split", "type", "data_files", "ds_type", "field", "field_messages", "field_tools",
         "message_field_role", "message_field_content", "message_property_mappings",
         "chat_template_kwargs"}  # fmt: skip
# Values that match our behaviour, so nothing is lost.
_SAME_HERE: dict[str, tuple[Any, ...]] = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]), "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",), "train_on_eot": ("turn",),
}  # fmt: skip
# Only templates that write the same text as ours, character by character, in every conversation of
# scripts/record_templates.py (axolotl's files of 2026-07-24).
_TEMPLATES = {"chatml": "chatml", "llama3": "llama-3", "qwen_25": "qwen-2.5", "gemma": "gemma-2",
              "gemma3": "gemma-3", "gemma3n": "gemma-3"}  # fmt: skip
_WHY = {
    "chat_template": "data.template is that of all sources, and takes a name such as chatml, or a Jinja file",
    "chat_template_jinja": "name a Jinja file in data.template",
    "roles_to_train": "data.loss_on is assistant, all or last",
    "train_on_eos": "the end of each turn that is a target is a target too",
    "shards": "select a part of the rows with split, such as train[:10%]",
    "conversation": "the tokenizer's own template is used",
    "revision": "download that revision of the dataset, and name its files in data.train",
    "drop_system_message": "remove the system messages from the rows",
    "field_thinking": "a message has only a role, content and tool calls",
}


def data(given: Given) -> Settings:
    """Translate the sources and the evaluation data, and set the template if all sources use Alpaca's prompts."""
    train = _sources(given, "datasets")
    if not train:
        raise given.wrong("datasets", "must be a list with a path in each entry")
    settings: Settings = {"data.train": Note(train[0] if len(train) == 1 else train, "datasets")}
    if {source.get("format") for source in train} == {"alpaca"}:
        settings["data.template"] = Note("none", "type: alpaca, which has Alpaca's own prompt and no chat template")
    if "test_datasets" in given:
        settings["data.eval"] = Note(_sources(given, "test_datasets"), "test_datasets")
        return settings
    share = given.number("val_set_size")
    if share >= 1:
        given.lose("val_set_size", "data.eval is a fraction of the rows, below 1, or other data")
        share = 0
    return settings | {"data.eval": given.note(share, "val_set_size")}


def template(given: Given) -> Settings:
    """Translate the chat template. The datasets cannot have others (`_WHY`)."""
    name, jinja = given.text("chat_template"), given.text("chat_template_jinja")
    if jinja is not None:
        if "\n" not in jinja and "{" not in jinja:
            return {"data.template": jinja}
        given.lose("chat_template_jinja", "write it to a file, and name that file in data.template")
    elif name in _TEMPLATES:
        return {"data.template": Note(_TEMPLATES[name], f"chat_template: {name}")}
    elif name is not None and not name.startswith("tokenizer_default"):
        reason = "the tokenizer's own template is used; data.template takes a name such as chatml, or a Jinja file"
        given.lose("chat_template", reason)
    return {}


def template_variables(given: Given) -> Settings:
    """Translate `chat_template_kwargs`, of the file and of its datasets: here all sources have the same."""
    key = "chat_template_kwargs"
    variables = variables_in(given, key, given.get(key)) if key in given else {}
    origins = [key] if variables else []
    for name in ("datasets", "test_datasets"):
        entries: Any = given.get(name)  # what is not a list of mappings is refused with the sources
        for index, entry in enumerate(cast("list[Any]", entries) if isinstance(entries, list) else []):
            table = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
            if table.get(key) is None:
                continue
            where = f"{name}[{index}].{key}"
            own = variables_in(given, where, table[key])
            if any(variables.get(each, value) != value for each, value in own.items()):
                given.lose(where, "data.template_variables are those of all sources", own)
            else:
                variables |= own
                origins.append(where)
    return {"data.template_variables": Note(variables, ", ".join(origins))} if variables else {}


def dedup(given: Given) -> Settings:
    """Translate whether equal rows are left out."""
    return {"data.dedup": "exact"} if given.flag("dataset_exact_deduplication") else {}


def _sources(given: Given, key: str) -> list[dict[str, Any]]:
    entries = given.get(key)
    if not isinstance(entries, list):
        raise given.wrong(key, "must be a list")
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(cast(list[Any], entries)):
        if not isinstance(entry, dict):
            raise given.wrong(key, "must be a list of mappings")
        sources += _source(given, f"{key}[{index}]", cast(dict[str, Any], entry))
    return sources


def _source(given: Given, where: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
    _report_other_keys(given, where, entry)
    format, columns = _layout(given, where, entry)
    source: dict[str, Any] = {"path": entry.get("path")}
    files = entry.get("data_files")
    paths: list[Any] = [files] if isinstance(files, str) else cast(list[Any], files or [entry.get("path")])
    if format:
        source["format"] = format
    if columns:
        source["columns"] = columns
    if not files:
        part = {"subset": entry.get("name"), "split": entry.get("split")}
        source |= {key: value for key, value in part.items() if value}
    return [source | {"path": path} for path in paths]


def _layout(given: Given, where: str, entry: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return our format, and the names of its columns in the file."""
    kind = entry.get("type")
    if isinstance(kind, dict):
        return _own_layout(given, where, cast(dict[str, Any], kind))
    name, _, style = str(kind or "").partition(":")
    format = _FORMATS.get(name)
    if format is None or style:
        reason = "its prompts are not supported" if format else "the format is detected from the columns"
        given.lose(f"{where}.type", f"{reason}; allowed are the formats of data.format", value=kind)
    if format == "text":
        return format, {"text": entry["field"]} if entry.get("field") else {}
    if format in ("messages", "sharegpt"):
        return _chat_layout(given, where, entry, format)
    return format, {}


def _own_layout(given: Given, where: str, kind: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    for key in kind.keys() - _OWN_TYPE.keys():
        if not is_off(kind[key]):
            given.lose(f"{where}.type.{key}", "prompts come from data.template, or are Alpaca's", value=kind[key])
    return "alpaca", {ours: kind[theirs] for theirs, ours in _OWN_TYPE.items() if kind.get(theirs)}


def _chat_layout(given: Given, where: str, entry: dict[str, Any], format: str) -> tuple[str, dict[str, Any]]:
    mapping: Any = entry.get("message_property_mappings") or {}
    names: dict[str, Any] = cast(dict[str, Any], mapping) if isinstance(mapping, dict) else {}
    role = names.get("role") or entry.get("message_field_role") or "role"
    content = names.get("content") or entry.get("message_field_content") or "content"
    if (role, content) == ("from", "value"):
        format = "sharegpt"
    elif (role, content) != ("role", "content"):
        reason = "a message has a role and content, or from and value; rename them in the file"
        given.lose(f"{where}.message_property_mappings", reason, value=names or {"role": role, "content": content})
    for name in names.keys() - {"role", "content"}:
        given.lose(f"{where}.message_property_mappings.{name}", _WHY["field_thinking"], value=names[name])
    key = "conversations" if format == "sharegpt" else "messages"
    column = entry.get("field_messages") or "messages"
    columns = {key: column} if column != key else {}
    if entry.get("field_tools") not in (None, "tools"):
        columns["tools"] = entry["field_tools"]
    return format, columns


def _report_other_keys(given: Given, where: str, entry: dict[str, Any]) -> None:
    for key, value in entry.items():
        if key in _READ:
            continue
        if is_off(value) or value in _SAME_HERE.get(key, ()):
            given.skip(f"{where}.{key}", "it is the same here", value=value)
        else:
            reason = _WHY.get(key, "a source has only path, subset, split, format, columns and weight")
            given.lose(f"{where}.{key}", reason, value=value)
