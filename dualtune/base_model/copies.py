"""Copies of a model directory: one to load from, and one for merged weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dualtune.base_model.config_file import config_for_loaders
from dualtune.base_model.inside import file_in
from dualtune.base_model.weights import INDEX, SINGLE, BaseWeights
from dualtune.errors import FormatError
from dualtune.io.untrusted import open_file
from dualtune.text.redaction import SecretSearch

# The files of a model besides its weights. Other files are not copied.
COPIED = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt",
)  # fmt: skip
MAX_COPIED_BYTES = 64 << 20


@contextmanager
def staged(directory: Path, weights: BaseWeights | None) -> Generator[Path]:
    """A directory for a library's loader, with exactly one model: the checked config, and links to the weight files.

    Libraries look for more than weights in a model directory: an adapter that names another base, other formats,
    anything that matches model*.safetensors. Here they find one model. Without weights it contains only the config.
    """
    config = config_for_loaders(directory)
    with tempfile.TemporaryDirectory(prefix="dualtune-model-") as name:
        staging = Path(name)
        with (staging / "config.json").open("w", encoding="utf-8") as file:
            json.dump(config, file)
        if weights is not None:
            _link(staging, weights)
        yield staging


def _link(staging: Path, weights: BaseWeights) -> None:
    count = len(weights.files)
    names = {file: f"model-{i:05d}-of-{count:05d}.safetensors" for i, file in enumerate(weights.files, start=1)}
    if count == 1:
        names = {weights.files[0]: SINGLE}
    for file, name in names.items():
        (staging / name).symlink_to(file.resolve())
    if count > 1:
        weight_map = {tensor: names[stored.file] for tensor, stored in weights.tensors.items()}
        (staging / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def copy_without_weights(source: Path, target: Path) -> None:
    """Make `target` a new model directory with the config, tokenizer, template and licence files of `source`.

    FormatError for a link that leaves `source`, and for a file that contains a secret: the copy will be shared.
    """
    contents = {name: _content(source, name) for name in COPIED if os.path.lexists(source / name)}
    target.mkdir(parents=True)
    for name, content in contents.items():
        (target / name).write_bytes(content)


def _content(source: Path, name: str) -> bytes:
    file = file_in(source, name)
    with open_file(file) as stream:
        content = stream.read(MAX_COPIED_BYTES + 1)
    if len(content) > MAX_COPIED_BYTES:
        raise FormatError(f"{file}: {file.stat().st_size} bytes, at most {MAX_COPIED_BYTES} are copied")
    search = SecretSearch()
    search.feed(content)
    if search.found:
        raise FormatError(f"{file}: holds {search.found} (not shown), and would be copied. Remove it, and revoke it")
    return content
