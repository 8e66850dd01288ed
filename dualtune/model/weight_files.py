"""The weight files of a base model and the tensors in them, read only from the headers."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dualtune.base import fields
from dualtune.base.errors import EnvironmentFault, FormatError
from dualtune.base.fields import shown
from dualtune.base.files import file_in
from dualtune.base.untrusted import FLOAT_BITS, MAX_HEADER_BYTES, open_file, read_header, read_json
from dualtune.model.gguf import is_gguf

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHARD = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors", re.ASCII)
REMEDY = "For a model of the hub: hf download NAME --force-download; in a git clone: git lfs pull"
MAX_SHARDS = 1000
_LISTED = re.compile(r"[\w-]+(\.[\w-]+)*\.safetensors", re.ASCII)
# The dtypes of safetensors, with their size in bits.
DTYPE_BITS = FLOAT_BITS | {
    "I64": 64, "U64": 64, "C64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor's position in a file."""

    file: Path
    begin: int  # byte of the file
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The weights of a base model: exactly the files that are checked, fingerprinted and loaded."""

    directory: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def weights_in(directory: Path) -> BaseWeights:
    """Return the weights of a model directory, after reading the header of every file and checking its size.

    They are the files in model.safetensors.index.json, or else model.safetensors, or else the numbered shards of one
    model. Other files are not the model and are never loaded. An index together with a model.safetensors is refused,
    because libraries choose differently between the two.

    EnvironmentFault if there are no weights; FormatError for damaged files, links that leave the directory, an index
    that disagrees with the files, and a tensor that is in two files.
    """
    listed = _chosen(directory)
    tensors: dict[str, StoredTensor] = {}
    for file, names in listed.items():
        of_file = _tensors(directory, file.name)
        if names is not None:
            check_shard(file, set(of_file), names, directory / INDEX)
        if twice := sorted(of_file.keys() & tensors.keys()):
            other = tensors[twice[0]].file.name
            raise FormatError(f"{file}: the tensor {shown(repr(twice[0]))} is in {other} too. {REMEDY}")
        tensors |= of_file
    return BaseWeights(directory, tuple(listed), tensors)


def has_weights(directory: Path) -> bool:
    return any(directory.glob("model*.safetensors"))


def _chosen(directory: Path) -> dict[Path, set[str] | None]:
    """Return file -> its tensors by the index; None if there is no index."""
    single = directory / SINGLE
    if os.path.lexists(directory / INDEX):
        listed = shards_of(file_in(directory, INDEX))
        if os.path.lexists(single) and single not in listed:
            raise FormatError(
                f"{directory}: holds two models: {SINGLE}, and the files that {INDEX} names. Remove one of the two"
            )
        return {file: listed[file] for file in sorted(listed)}
    if os.path.lexists(single):
        return {single: None}
    return dict.fromkeys(_numbered(directory))


def _numbered(directory: Path) -> list[Path]:
    """Return all shards of a model without an index, by their names."""
    matches = [match for path in directory.iterdir() if (match := _SHARD.fullmatch(path.name))]
    if not matches:
        raise _no_weights(directory)
    count = matches[0][2]
    whole = {f"model-{i:0{len(count)}d}-of-{count}.safetensors" for i in range(1, min(int(count), 1000) + 1)}
    if odd := sorted(whole ^ {match[0] for match in matches}):
        fault = "is missing" if odd[0] in whole else "belongs to another set of files"
        raise FormatError(f"{directory}: there is no {INDEX}, and {odd[0]} {fault}. {REMEDY}")
    return sorted(directory / name for name in whole)


def _no_weights(directory: Path) -> EnvironmentFault:
    names = sorted(path.name for path in directory.iterdir())
    unsafe = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    hint = f" It has {', '.join(unsafe[:3])}: convert to safetensors, other formats are not loaded." if unsafe else ""
    if files := [name for name in names if is_gguf(name)]:
        hint = f" To train on a GGUF file, name the file: model.name: {directory / files[0]}."
    holds = f"{', '.join(names[:20])}{', …' if len(names) > 20 else ''}" if names else "nothing"
    return EnvironmentFault(
        f"model.name: {directory} has no weights ({SINGLE}, or {INDEX} and the files it names); it holds: "
        f"{holds}.{hint}"
    )


def _tensors(directory: Path, name: str) -> dict[str, StoredTensor]:
    """Return the tensors in a file's header, after checking that they cover the file exactly."""
    try:
        file = file_in(directory, name)
        with open_file(file) as stream:
            entries, start = read_header(stream, file, DTYPE_BITS)
    except FormatError as error:
        raise FormatError(f"model.name: {str(error).rstrip('.')}. {REMEDY}") from None
    return {e.name: StoredTensor(file, start + e.begin, e.end - e.begin, e.dtype, e.shape) for e in entries}


def shards_of(index: Path) -> dict[Path, set[str]]:
    """Return shard -> the names of its tensors by the index."""
    shards: dict[Path, set[str]] = {}
    table = fields.subtable(read_json(index, max_bytes=MAX_HEADER_BYTES), "weight_map", index)
    for name, file in table.items():
        if not isinstance(file, str) or not _LISTED.fullmatch(file):
            raise fields.wrong(f"{index}: weight_map", name, file, "the name of a safetensors file in this directory")
        shards.setdefault(index.parent / file, set()).add(name)
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise FormatError(f"{index}: weight_map: lists {len(shards)} files, must be 1 to {MAX_SHARDS}")
    return shards


def check_shard(shard: Path, stored: set[str], listed: set[str], index: Path) -> None:
    """Raise FormatError unless the shard has exactly the tensors that the index lists for it."""
    if other := sorted(stored ^ listed):
        fault = "is listed there, but not in the file" if other[0] in listed else "is in the file, but not listed there"
        raise FormatError(
            f"{shard}: does not match {index.name} in {len(other)} tensor{'s' * (len(other) > 1)}: "
            f"{other[0][:200]!r} {fault}. Copy the files again"
        )


def check_complete(
    directory: Path, *, missing: Collection[str], unexpected: Collection[str], mismatched: Mapping[str, str]
) -> None:
    """Raise FormatError, with names, unless a directory has exactly the tensors of the model in its config.json.

    A library would fill missing tensors at random. `mismatched`: name -> both shapes.
    """
    faults = {
        "missing": [shown(name) for name in sorted(missing)],
        "not in the model": [shown(name) for name in sorted(unexpected)],
        "of another shape": [f"{shown(name)} ({shapes})" for name, shapes in sorted(mismatched.items())],
    }
    texts = [
        f"{len(names)} {fault}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for fault, names in faults.items()
        if names
    ]
    if texts:
        raise FormatError(
            f"model.name: {directory}: the tensors are not those of the model in config.json; {'; '.join(texts)}. "
            "Nothing was loaded. Use the config.json and the weights of the same model, both unchanged; if they are, "
            "this backend does not support the model in this form, and the other one may"
        )
