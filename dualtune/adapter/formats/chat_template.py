"""The chat template that an adapter was trained with: beside its weights, and in the model that it is merged into.

PEFT and mlx-lm pass over the file in an adapter directory. In a model directory transformers, mlx-lm and llama.cpp look
for it under the same name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dualtune.errors import FormatError
from dualtune.io import fields
from dualtune.io.disk import json_bytes
from dualtune.io.untrusted import open_file, read_json

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20  # what the most characters that a template may have can take
NONE = "none"  # in place of a hash: trained without one
_TOKENIZER_CONFIG = "tokenizer_config.json"
_PROCESSOR_TEMPLATE = "chat_template.json"  # of models of several media, in older transformers
_MAX_TOKENIZER_CONFIG_BYTES = 64 << 20


def hash_of(source: str) -> str:
    """Tells templates apart."""
    return f"sha256 {hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def read_template(directory: Path) -> str | None:
    """The template in a directory, None if there is none. FormatError if it is too large or no text."""
    path = directory / TEMPLATE_FILE
    if not path.exists():
        return None
    with open_file(path) as file:
        data = file.read(MAX_TEMPLATE_BYTES + 1)
    if len(data) > MAX_TEMPLATE_BYTES:
        raise FormatError(f"{path}: more than {MAX_TEMPLATE_BYTES} bytes, which no chat template has")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8 (byte {error.start})") from None


def recorded_hash(template: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The hash of the template of a training, "none" where it had none, None where that is not recorded."""
    if template is not None:
        return hash_of(template)
    training = fields.subtable(metadata, "training", "dualtune.json")
    if training.get("template") == NONE:
        return NONE
    return fields.name(training, "template_hash", "dualtune.json: training")


def described(template: str | None, metadata: Mapping[str, Any]) -> str:
    """What is known of the template of a training, in a few words."""
    found = recorded_hash(template, metadata)
    if found is None:
        return "not recorded"
    if found == NONE:
        return "none: trained on prompts as they are"
    where = f"in {TEMPLATE_FILE}" if template is not None else "which is not in the directory"
    return f"{fields.shown(found)}, {where}"


def mismatch(trained: str | None, used: str) -> str | None:
    """One line for a user where the template that is used (its hash, or "none") is not that of the training."""
    if trained == NONE:
        return "the adapter was trained without a chat template" + (
            ", so the prompt goes in as it is" if used == NONE else f", and is used with one ({used})"
        )
    if trained is None or trained == used:
        return None
    here = "none is used here" if used == NONE else f"used here is {used}"
    return f"the adapter was trained with the chat template {fields.shown(trained)}, and {here}"


def settle(model: Path, template: str | None, metadata: Mapping[str, Any]) -> str:
    """Give the copy of a base model that an adapter was merged into the template of the training; says what was done.

    Where that is not known, the base's remains.
    """
    trained = recorded_hash(template, metadata)
    if template is None and trained != NONE:
        base = _source_in(model)
        if trained is None or trained == (hash_of(base) if base else NONE):
            return "the base's"
        return f"the base's, but the adapter was trained with another ({fields.shown(trained)}), which is not beside it"
    _replace(model, template)
    return "none, as in the training" if template is None else f"of the training, in {TEMPLATE_FILE}"


def _source_in(model: Path) -> str | None:
    if (source := read_template(model)) is not None:
        return source
    found = _tokenizer_config(model).get("chat_template")
    if isinstance(found, list):  # several by name
        named = [cast("dict[str, Any]", item) for item in cast("list[Any]", found) if isinstance(item, dict)]
        found = next((item.get("template") for item in named if item.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _replace(model: Path, template: str | None) -> None:
    """As transformers 5 saves it: the file alone. llama.cpp prefers the key, which therefore goes."""
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
