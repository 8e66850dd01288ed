"""Copies of a model directory: one to load from, one for merged weights, and one of the whole model.

Every copy takes the names of MODEL_FILES and the checked weights, and nothing else: a stranger's directory may hold
code, pickles, and links to private files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dualtune.base.errors import FormatError
from dualtune.base.files import file_in, json_bytes
from dualtune.base.redaction import SecretSearch
from dualtune.base.untrusted import open_file, parse_object
from dualtune.model.config_file import check_storage, config_for_loaders, read_config
from dualtune.model.weight_files import INDEX, SINGLE, BaseWeights, weights_in

# The files of a model besides its weights, wherever a model directory is copied. No other file is.
MODEL_FILES = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "tokenizer.model", "tekken.json",
    "tiktoken.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "LICENSE",
    "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md", "USE_POLICY.md",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a directory of further templates, as transformers reads it
# What describes this very model, with its weights as they are: not copied to a merged one.
OF_THE_WHOLE = ("README.md", "dualtune.json")
MAX_COPIED_BYTES = 64 << 20
MAX_TEMPLATES = 64
MAX_VOCABULARIES = 8
# The vocabularies of SentencePiece and tiktoken, whatever they are called.
_VOCABULARY = re.compile(r"[\w-][\w.-]{0,99}\.(model|model\.v\d|tiktoken)", re.ASCII)
_TEMPLATE = re.compile(r"[\w-]{1,100}\.jinja", re.ASCII)


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
    _copy(source, target, _names(source))


def copy_index(source: Path, target: Path, num_bytes: int) -> None:
    """Copy the index of a model in shards, if it has one, for files of the same names with `num_bytes` of tensors."""
    if os.path.lexists(source / INDEX):
        index = parse_object(_content(source, INDEX), source / INDEX)
        metadata: dict[str, object] = index.get("metadata") or {}
        (target / INDEX).write_bytes(json_bytes(index | {"metadata": metadata | {"total_size": num_bytes}}))


def copy_model(source: Path, target: Path, *, link_weights: bool = False) -> list[str]:
    """Make `target` a new directory with the whole model of `source`. Return the names that were left out, sorted.

    `link_weights`: for a converter that reads and goes; the weights are links to the checked files. FormatError as
    `copy_without_weights`, and for weights that `find_weights` refuses.
    """
    weights = weights_in(source)
    check_storage(read_config(source), weights)
    names = [*_names(source), *(name for name in OF_THE_WHOLE if os.path.lexists(source / name))]
    _copy(source, target, names)
    if link_weights:
        _link(target, weights)
    else:
        for file in weights.files:
            with open_file(file_in(source, file.name)) as stream, (target / file.name).open("xb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
        if os.path.lexists(source / INDEX):
            (target / INDEX).write_bytes(_content(source, INDEX))
    copied = {INDEX, *(name.partition("/")[0] for name in names), *(file.name for file in weights.files)}
    return sorted(path.name for path in source.iterdir() if path.name not in copied)


def _names(source: Path) -> list[str]:
    """Return the names of MODEL_FILES and of further templates that are there, also as broken links."""
    names = [name for name in MODEL_FILES if os.path.lexists(source / name)]
    others = {path.name for path in source.iterdir() if _VOCABULARY.fullmatch(path.name)} - {*names}
    if len(others) > MAX_VOCABULARIES:
        raise FormatError(f"{source}: {len(others)} vocabularies of tokenizers, at most {MAX_VOCABULARIES} are copied")
    names += sorted(others)
    if not (source / TEMPLATES).is_dir():
        return names
    templates = [path.name for path in (source / TEMPLATES).iterdir() if _TEMPLATE.fullmatch(path.name)]
    if len(templates) > MAX_TEMPLATES:
        raise FormatError(f"{source / TEMPLATES}: {len(templates)} templates, at most {MAX_TEMPLATES} are copied")
    return [*names, *(f"{TEMPLATES}/{name}" for name in sorted(templates))]


def _copy(source: Path, target: Path, names: list[str]) -> None:
    contents = {name: _content(source, name) for name in names}
    target.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (target / name).parent.mkdir(exist_ok=True)
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
