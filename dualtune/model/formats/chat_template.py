"""The chat template of an adapter's training: stored with its weights, and in a merged model.

PEFT and mlx-lm ignore the file in an adapter directory. In a model directory transformers, mlx-lm and llama.cpp look
for it under the same name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from dualtune.base import fields
from dualtune.base.errors import FormatError
from dualtune.base.files import file_in, json_bytes
from dualtune.base.untrusted import open_file, read_json

TEMPLATE_FILE = "chat_template.jinja"
ADDITIONAL_TEMPLATES = "additional_chat_templates"
MAX_TEMPLATE_BYTES = 1 << 20  # the size of the longest template that is allowed
NONE = "none"  # instead of a hash: trained without a template
_TOKENIZER_CONFIG = "tokenizer_config.json"
_PROCESSOR_TEMPLATE = "chat_template.json"  # of multimodal models, in older transformers
_MAX_TOKENIZER_CONFIG_BYTES = 64 << 20


def hash_of(source: str) -> str:
    """Return a hash that identifies a template."""
    return f"sha256 {hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def read_template(directory: Path) -> str | None:
    """Return the template in a directory, None if there is none. FormatError if it is too large or not text."""
    if not os.path.lexists(directory / TEMPLATE_FILE):
        return None
    path = file_in(directory, TEMPLATE_FILE, "adapter")  # it is copied to merged models and bundles
    with open_file(path) as file:
        return template_in(file, path)


def template_in(file: BufferedReader, path: Path) -> str:
    """Return the template in an open file."""
    file.seek(0)
    data = file.read(MAX_TEMPLATE_BYTES + 1)
    if len(data) > MAX_TEMPLATE_BYTES:
        raise FormatError(f"{path}: got a larger file, must be at most {MAX_TEMPLATE_BYTES} bytes for a chat template")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8 (byte {error.start})") from None


def recorded_hash(template: str | None, metadata: Mapping[str, Any]) -> str | None:
    """Return the hash of the training's template, "none" if it had none, None if that is not recorded."""
    if template is not None:
        return hash_of(template)
    training = fields.subtable(metadata, "training", "dualtune.json")
    if training.get("template") == NONE:
        return NONE
    return fields.name(training, "template_hash", "dualtune.json: training")


def describe_template(template: str | None, metadata: Mapping[str, Any]) -> str:
    """Describe the training's template in a few words."""
    recorded = recorded_hash(template, metadata)
    if recorded is None:
        return "not recorded"
    if recorded == NONE:
        return "none: trained on plain prompts"
    where = f"in {TEMPLATE_FILE}" if template is not None else "which is not in the directory"
    return f"{fields.shown(recorded)}, {where}"


def mismatch(trained: str | None, used: str) -> str | None:
    """Return a one-line warning if the template in use (its hash, or "none") is not the training's."""
    if trained == NONE:
        return "the adapter was trained without a chat template" + (
            ", so the prompt is used unchanged" if used == NONE else f", but is used with one here ({used})"
        )
    if trained is None or trained == used:
        return None
    usage = "none is used here" if used == NONE else f"used here is {used}"
    return f"the adapter was trained with the chat template {fields.shown(trained)}, and {usage}"


def write_training_template(model: Path, template: str | None, metadata: Mapping[str, Any]) -> str:
    """Write the training's template into the merged model, a copy of the base; return a note on what was done.

    If the template is not recorded, the base's remains. The base's additional templates remain if its default does.
    """
    trained = recorded_hash(template, metadata)
    if template is None and trained != NONE:
        base = _source_in(model)
        if trained is None or trained == (hash_of(base) if base else NONE):
            return "the base's"
        return (
            f"the base's, but the adapter was trained with another ({fields.shown(trained)}), which it does not contain"
        )
    if template != _source_in(model) and (model / ADDITIONAL_TEMPLATES).is_dir():
        shutil.rmtree(model / ADDITIONAL_TEMPLATES)  # of the base's way to write a chat; one of them is taken for tools
    _replace(model, template)
    return "none, as in the training" if template is None else f"of the training, in {TEMPLATE_FILE}"


def _source_in(model: Path) -> str | None:
    if (source := read_template(model)) is not None:
        return source
    template = _tokenizer_config(model).get("chat_template")
    if isinstance(template, list):  # several templates, by name
        named = [cast("dict[str, Any]", item) for item in cast("list[Any]", template) if isinstance(item, dict)]
        template = next((item.get("template") for item in named if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _replace(model: Path, template: str | None) -> None:
    """Write only the file, as transformers 5 does. llama.cpp prefers the key, so the key is removed."""
    config = _tokenizer_config(model)
    if config.pop("chat_template", None) is not None:
        (model / _TOKENIZER_CONFIG).write_bytes(json_bytes(config))
    for name in (TEMPLATE_FILE, _PROCESSOR_TEMPLATE):
        (model / name).unlink(missing_ok=True)
    if template is not None:
        (model / TEMPLATE_FILE).write_bytes(template.encode())


def _tokenizer_config(model: Path) -> dict[str, Any]:
    path = model / _TOKENIZER_CONFIG
    if not path.is_file():
        return {}
    return read_json(path, max_bytes=_MAX_TOKENIZER_CONFIG_BYTES, strict=False, allowance=4)
