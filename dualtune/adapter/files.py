"""Reading files that somebody else wrote: JSON and safetensors, checked before anything large is allocated.

A safetensors file is 8 bytes (little-endian N), N bytes of JSON {name: {dtype, shape, data_offsets}}, then the bytes of
the tensors without holes (https://github.com/huggingface/safetensors#format). It is decoded here because its NumPy
binding knows no bfloat16, and because every check of its header names the file and both sizes. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from dualtune.adapter.spec import Tensors
from dualtune.errors import FormatError

MAX_HEADER_BYTES = 16 << 20  # an adapter of 100 layers has a header of about 0.2 MB
MAX_DIMENSIONS = 8
LFS_MAGIC = b"version https://git-lfs"
LFS_ADVICE = "is a git-lfs pointer, not the file itself. Run: git lfs pull"

_NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # bfloat16 as raw bits


class _Entry(NamedTuple):
    """One tensor of a header; begin and end are bytes from the end of the header."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def parse_object(data: bytes, where: object) -> dict[str, Any]:
    """Strict JSON: one object, UTF-8, no duplicate keys (the reader of the last one wins elsewhere), no NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a key appears twice")
        return table

    def refuse_constant(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    if data.startswith(LFS_MAGIC):
        raise FormatError(f"{where}: {LFS_ADVICE}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse_constant)
    except RecursionError:
        raise FormatError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: got a JSON {type(value).__name__}, must be an object")
    return cast("dict[str, Any]", value)


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The object in a JSON file of at most `max_bytes`."""
    with _open(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise FormatError(f"{path}: {path.stat().st_size} bytes, at most {max_bytes} are allowed")
    return parse_object(data, path)


def read_safetensors(path: Path) -> Tensors:
    """All tensors of the file by name, as float32 (bfloat16 and float16 exactly, float64 rounded once).

    Raises FormatError for anything but a whole, well-formed file of floating-point tensors. NaN and Inf pass: the
    caller decides.
    """
    with _open(path) as file:
        entries = _read_header(file, path)
        # The entries are in file order and without holes, so that each read starts where the last one ended.
        return {entry.name: _read_tensor(file, entry) for entry in entries}


def sha256_of(path: Path) -> str:
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_lfs_pointer(path: Path) -> bool:
    with _open(path) as file:
        return file.read(len(LFS_MAGIC)) == LFS_MAGIC


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None


def _read_header(file: BufferedReader, path: Path) -> list[_Entry]:
    """The entries in file order, once they are known to cover the rest of the file exactly."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    if not size:
        raise FormatError(f"{path}: 0 bytes: a write or a download was cut off. Copy the file again.")
    if is_lfs_pointer(path):
        raise FormatError(f"{path}: {LFS_ADVICE}")
    header_bytes = int.from_bytes(start, "little")
    if size >= 8 and header_bytes > MAX_HEADER_BYTES:
        raise FormatError(
            f"{path}: announces a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed. "
            "This is no safetensors file, or it is damaged."
        )
    if size < 8 + header_bytes:
        raise _truncated(path, got=size, expected=8 + header_bytes)

    table = parse_object(file.read(header_bytes), f"{path}: header")
    table.pop("__metadata__", None)
    entries = sorted(_parse_entry(name, info, path) for name, info in table.items())
    expected = 8 + header_bytes + max((entry.end for entry in entries), default=0)
    if size < expected:
        raise _truncated(path, got=size, expected=expected)
    position = 0
    for entry in entries:
        if entry.begin != position:
            fault = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise FormatError(f"{path}: tensor {entry.name!r} {fault} (offset {entry.begin}, expected {position})")
        position = entry.end
    if size > expected:
        raise FormatError(f"{path}: {size} bytes, expected {expected}: bytes after the last tensor")
    return entries


def _parse_entry(name: str, info: Any, path: Path) -> _Entry:
    match info:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise FormatError(f"{path}: tensor {name!r}: the header needs dtype, shape and two data_offsets")
    if dtype not in _NUMPY_DTYPES:
        raise FormatError(f"{path}: tensor {name!r}: got dtype {dtype!r}, must be one of {', '.join(_NUMPY_DTYPES)}")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise FormatError(f"{path}: tensor {name!r}: got shape {str(shape)[:100]}, must be a few numbers >= 0")
    num_bytes = math.prod(shape) * np.dtype(_NUMPY_DTYPES[dtype]).itemsize
    if begin < 0 or end - begin != num_bytes:
        raise FormatError(
            f"{path}: tensor {name!r}: offsets {begin}..{end} hold {end - begin} bytes, "
            f"shape {tuple(shape)} of {dtype} needs {num_bytes}"
        )
    return _Entry(begin, end, name, dtype, tuple(shape))


def _read_tensor(file: BufferedReader, entry: _Entry) -> np.ndarray:
    raw = np.fromfile(file, _NUMPY_DTYPES[entry.dtype], count=math.prod(entry.shape)).reshape(entry.shape)
    if entry.dtype == "BF16":  # the upper half of a float32
        return (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # a float64 too large becomes Inf, which the caller reports
        return raw.astype(np.float32, copy=False)


def _truncated(path: Path, *, got: int, expected: int) -> FormatError:
    return FormatError(f"{path}: {got} bytes, expected {expected}: the file is truncated. Copy it again.")
