"""A base model with more tokens: a model directory in the cache, made once, that is read as any other.

Each token gets the next free id. Where the vocabulary of the model has rows to spare, as in many models, those are
used; else embedding and output head grow. A new row starts as the mean of the rows of the pieces that the tokenizer
wrote the text with before, computed in float64 and rounded once, so that it is the same on every machine and backend.
The other weights are the base's own files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from dualtune.base.errors import ConfigError, DiskError
from dualtune.base.files import cache_dir, json_bytes, new_directory
from dualtune.base.tensors import FLOATS, SIZES, StoredForm, bytes_of, floats_of, rounded, write_safetensors
from dualtune.base.untrusted import read_json, read_metadata
from dualtune.data.tokens.tokenizer_files import CONFIG, LISTS, TOKENIZER, Loaded, load
from dualtune.data.tokens.tokenizer_vetting import MAX_FILE_BYTES, MAX_STRUCTURES
from dualtune.model.beside import NewToken
from dualtune.model.config_file import decoder_table, read_config, vocabulary_size
from dualtune.model.copies import copy_index, copy_without_weights
from dualtune.model.merging import stored_bytes
from dualtune.model.targets import is_embedding, is_head
from dualtune.model.weight_files import BaseWeights, StoredTensor, has_weights, weights_in

KEY = "data.new_tokens"


def with_new_tokens(directory: Path, tokens: Sequence[NewToken]) -> Path:
    """Return a model directory with these tokens: the given one if its tokenizer has them all.

    Without weights, only config and tokenizer are changed. ConfigError for a model that cannot be given tokens, and for
    a token that its tokenizer has otherwise: as a special one, or not as one.
    """
    if not tokens:
        return directory
    tokenizer = load(directory)
    missing = [token for token in tokens if not _has(tokenizer, token)]
    if not missing:
        return directory
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in directory.iterdir())
    identity = json.dumps(["2", str(directory.resolve()), files, missing])
    place = cache_dir() / "new_tokens" / f"{directory.name[:40]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not place.is_dir():
        try:
            with new_directory(place, by_library=True) as temporary:
                _write(directory, temporary, tokenizer, missing)
        except DiskError:
            if not place.is_dir():  # another process of the run may have made it meanwhile
                raise
    return place


def _has(tokenizer: Loaded, token: NewToken) -> bool:
    id = tokenizer.rust.token_to_id(token.text)
    if id is not None and token.special != (id in tokenizer.special_ids):
        keys, kinds = ("data.new_tokens", "data.new_special_tokens"), ("an ordinary token", "a special token")
        raise ConfigError(
            f"{keys[token.special]}: got {token.text!r}, which is {kinds[not token.special]} of this model already. To "
            f"train it, name it in {keys[not token.special]} or adapter.train_rows"
        )
    return id is not None


def _write(directory: Path, out: Path, tokenizer: Loaded, tokens: Sequence[NewToken]) -> None:
    if not (directory / TOKENIZER).is_file():
        raise ConfigError(
            f"{KEY}: {directory} has no {TOKENIZER}, to which tokens could be added. Save its tokenizer with "
            "transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)"
        )
    first = 1 + max(tokenizer.rust.get_vocab(with_added_tokens=True).values(), default=-1)
    ids = {token: first + number for number, token in enumerate(tokens)}
    copy_without_weights(directory, out)
    _add_to_tokenizer(directory, out, ids)
    size = vocabulary_size(directory)
    needed = first + len(tokens)
    if size is not None and needed > size:
        config = read_config(directory)
        cast(dict[str, Any], decoder_table(config))["vocab_size"] = needed
        (out / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if has_weights(directory):
        pieces = [tokenizer.rust.encode(token.text, add_special_tokens=False).ids for token in tokens]
        _write_weights(weights_in(directory), out, dict(zip(ids.values(), pieces, strict=True)))


def _add_to_tokenizer(directory: Path, out: Path, ids: Mapping[NewToken, int]) -> None:
    """Add tokens that stand for exactly their text."""
    table = read_json(directory / TOKENIZER, max_bytes=MAX_FILE_BYTES, strict=False, allowance=MAX_STRUCTURES)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {id: {"content": token.text, **flags, "special": token.special} for token, id in ids.items()}
    table["added_tokens"] = [*(table.get("added_tokens") or []), *({"id": id} | entry for id, entry in added.items())]
    (out / TOKENIZER).write_bytes(json_bytes(table))
    if not (directory / CONFIG).is_file():
        return
    config: dict[str, Any] = read_json(directory / CONFIG, max_bytes=MAX_FILE_BYTES, strict=False, allowance=4)
    if isinstance(listed := config.get("added_tokens_decoder"), dict):
        config["added_tokens_decoder"] = cast(dict[str, Any], listed) | {str(id): entry for id, entry in added.items()}
    if special := [token.text for token in ids if token.special]:
        # transformers 5 writes extra_special_tokens, 4 had a mapping of that name; both read the other list.
        key = next((key for key in LISTS if isinstance(config.get(key), list)), LISTS[0])
        config[key] = [*(config.get(key) or []), *special]
    (out / CONFIG).write_bytes(json_bytes(config))


def _write_weights(base: BaseWeights, out: Path, pieces: Mapping[int, Sequence[int]]) -> None:
    """Write the files with an embedding or an output head anew, and link the others."""
    tables = {name: tensor for name, tensor in base.tensors.items() if is_embedding(name) or is_head(name)}
    for name, tensor in tables.items():
        if tensor.dtype not in FLOATS or len(tensor.shape) != 2:
            raise ConfigError(
                f"{KEY}: {base.directory} stores {name} as {tensor.dtype}, to which no row can be added. Use the plain "
                "model, and model.quantization for the format in memory"
            )
    if not any(map(is_embedding, tables)):
        raise ConfigError(
            f"{KEY}: {base.directory} has no embedding of a known name, such as model.embed_tokens.weight"
        )
    forms = {
        name: StoredForm(tensor.dtype, (max(tensor.shape[0], 1 + max(pieces)), tensor.shape[1]))
        if name in tables
        else StoredForm(tensor.dtype, tensor.shape)
        for name, tensor in base.tensors.items()
    }

    def content(name: str) -> memoryview:
        raw = stored_bytes(base.tensors[name])
        return _grown(base.tensors[name], raw, pieces) if name in tables else raw.data

    for file in base.files:
        names = [name for name, tensor in base.tensors.items() if tensor.file == file]
        if tables.keys() & {*names}:
            metadata = read_metadata(file) or {"format": "pt"}
            write_safetensors(out / file.name, {name: forms[name] for name in names}, content, metadata)
        else:
            _link(file, out / file.name)
    copy_index(base.directory, out, sum(form.num_bytes for form in forms.values()))


def _grown(table: StoredTensor, raw: np.ndarray, pieces: Mapping[int, Sequence[int]]) -> memoryview:
    """Return the bytes of a table [V, D] with the new rows."""
    size, width = table.shape
    stored = raw.reshape(size, -1)
    rows = max(size, 1 + max(pieces))
    grown = np.zeros((rows, stored.shape[1]), np.uint8)
    grown[:size] = stored
    assert stored.shape[1] == width * SIZES[table.dtype]
    for id, parts in pieces.items():
        of = stored[[part for part in parts if part < size]] if parts else stored
        mean = floats_of(of.reshape(-1), table.dtype).reshape(-1, width).mean(axis=0, dtype=np.float64)
        row = bytes_of(rounded(mean.astype(np.float32), table.dtype))
        grown[id] = np.frombuffer(row, np.uint8)
    return grown.reshape(-1).data


def _link(file: Path, target: Path) -> None:
    """Make a second name of a file, or a copy where the cache is on another disk."""
    with contextlib.suppress(OSError):
        os.link(file.resolve(), target)
        return
    shutil.copyfile(file, target)
