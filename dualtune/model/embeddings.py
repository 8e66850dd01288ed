"""Whether a model has learned a token: its row of the embedding, and of the output head if that is stored apart.

A row counts as untrained if it is zero, if its norm is under a fifth of the median of ordinary rows, or if two or more
of the other reserved tokens have the very same row: each reserved row of a base checkpoint is what the initialization
left, and training moves rows apart. Only these rows are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualtune.base.tensors import FLOATS, floats_of
from dualtune.model.config_file import decoder_table, read_config
from dualtune.model.targets import OUTPUT_HEAD, is_embedding, is_head
from dualtune.model.weight_files import StoredTensor, has_weights, weights_in

SMALL = 0.2  # of the median norm of ordinary rows
TWINS = 2  # other reserved rows that are the same
TABLE_DTYPES = ("F32", "F16", "BF16")
SAMPLED = 256  # ordinary rows, spread over the vocabulary


class UntrainedRow(NamedTuple):
    """A row that training has not moved: the tensor, and why."""

    tensor: str
    why: str


def untrained_rows(directory: Path, token: int, reserved: Iterable[int]) -> list[UntrainedRow]:
    """Return where a model has not learned a token; empty for a quantized table, which the rule does not know.

    `reserved`: the ids of the special tokens, which may be untrained too. Raises as `find_weights` for broken files.
    """
    tables = {
        name: tensor
        for name, tensor in weights_in(directory).tensors.items()
        if (is_embedding(name) or is_head(name)) and tensor.dtype in TABLE_DTYPES and len(tensor.shape) == 2
    }
    reserved = {*reserved} - {token}
    reasons = {name: _why(tensor, token, reserved) for name, tensor in sorted(tables.items())}
    return [UntrainedRow(name, why) for name, why in reasons.items() if why]


def own_head(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether the files hold an output head that differs from the embedding.

    It is then used even if the config ties the two, as transformers does.
    """
    heads = [tensor for name, tensor in tensors.items() if is_head(name)]
    tables = [tensor for name, tensor in tensors.items() if is_embedding(name)]
    if len(heads) != 1 or len(tables) != 1:
        return False
    head, table = heads[0], tables[0]
    return (head.dtype, head.shape) == (table.dtype, table.shape) and not _same_bytes(head, table)


def tied_head(directory: Path) -> str | None:
    """Return what the output head of a model is called if it is the embedding, and has no numbers of its own."""
    config = read_config(directory)
    tensors: Mapping[str, StoredTensor] = weights_in(directory).tensors if has_weights(directory) else {}
    names = [name for name in tensors if is_head(name)]
    ties = config.get("tie_word_embeddings", decoder_table(config).get("tie_word_embeddings"))
    if own_head(tensors) or (names and not ties):
        return None
    return names[0].removesuffix(".weight") if names else OUTPUT_HEAD


def untied_head(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return a sentence if the files hold a head of their own although the config ties it; None if they do not."""
    ties = config.get("tie_word_embeddings", decoder_table(config).get("tie_word_embeddings"))
    if not ties or not own_head(tensors):
        return None
    return "the output head is stored and differs from the embedding: it is used, although config.json ties the two"


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        remaining = one.num_bytes
        while remaining > 0:
            size = min(remaining, 1 << 24)
            if first.read(size) != second.read(size):
                return False
            remaining -= size
    return True


def _why(table: StoredTensor, token: int, reserved: set[int]) -> str | None:
    """Return why a row of a table [V, D] counts as untrained, None if it does not."""
    size = table.shape[0]
    if token >= size:
        return None  # refused elsewhere
    row = _rows(table, [token])[0]
    norm = float(np.linalg.norm(row))
    if norm == 0:
        return "it is zero"
    ordinary = [i for i in range(0, size, max(1, size // SAMPLED)) if i not in reserved and i != token]
    median = float(np.median(np.linalg.norm(_rows(table, ordinary), axis=1))) if ordinary else 0.0
    if norm < SMALL * median:
        return f"its norm is {norm:.2g}, that of ordinary tokens {median:.2g}"
    twins = sum(bool((other == row).all()) for other in _rows(table, [i for i in sorted(reserved) if i < size]))
    return f"{twins} other reserved tokens have the same" if twins >= TWINS else None


def _rows(table: StoredTensor, tokens: list[int]) -> np.ndarray:
    """Return rows of a table, float32 [N, D]."""
    width = table.shape[1]
    rows, row_bytes = np.empty((len(tokens), width), np.float32), width * FLOATS[table.dtype].itemsize
    with table.file.open("rb") as stream:
        for row, token in zip(rows, tokens, strict=True):
            stream.seek(table.begin + token * row_bytes)
            row[:] = floats_of(stream.read(row_bytes), table.dtype)
    return rows
