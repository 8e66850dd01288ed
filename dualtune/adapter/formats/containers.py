"""Weights in other containers than one safetensors file: PEFT's shards, the NumPy archive of an old mlx-lm.

    adapter_model.safetensors.index.json    {"weight_map": {tensor: adapter_model-00001-of-00002.safetensors, …}}
    adapters.npz                            a zip archive, not compressed, of one .npy file for each tensor

Both are untrusted: a shard must be a file of this directory, and an array as large as its bytes in the archive.
"""

from __future__ import annotations

import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.adapter.spec import Tensors
from dualtune.errors import FormatError
from dualtune.io import fields
from dualtune.io.untrusted import MAX_HEADER_BYTES, read_json

INDEX_FILE = "adapter_model.safetensors.index.json"
NPZ_FILE = "adapters.npz"
MAX_SHARDS = 1000

_SHARD = re.compile(r"[\w-]+(\.[\w-]+)*\.safetensors", re.ASCII)
# The version, the length of the header, and the header of a .npy file as NumPy and MLX write it
# (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). Object arrays, which are pickles, have
# another descr.
_NPY = re.compile(
    rb"\x93NUMPY(?:\x01\x00.{2}|[\x02\x03]\x00.{4})\{\s*'descr':\s*'(?P<descr>[^']{1,8})',\s*"
    rb"'fortran_order':\s*(?P<fortran>True|False),\s*'shape':\s*\((?P<shape>[\d, ]{0,100})\),?\s*\}\s*?\n",
    re.DOTALL,
)
_MAX_NPY_HEADER = 1024
_DTYPES = {b"<f2": "<f2", b"<f4": "<f4", b"<f8": "<f8"}


def shards_of(index: Path) -> dict[Path, set[str]]:
    """Return shard -> the names of its tensors by the index."""
    shards: dict[Path, set[str]] = {}
    table = fields.subtable(read_json(index, max_bytes=MAX_HEADER_BYTES), "weight_map", index)
    for name, file in table.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise fields.wrong(f"{index}: weight_map", name, file, "the name of a safetensors file in this directory")
        shards.setdefault(index.parent / file, set()).add(name)
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise FormatError(f"{index}: weight_map: lists {len(shards)} files, must be 1 to {MAX_SHARDS}")
    return shards


def check_shard(shard: Path, found: set[str], listed: set[str], index: Path) -> None:
    """Raise FormatError unless the shard has exactly the tensors that the index lists for it."""
    if other := sorted(found ^ listed):
        fault = "is listed there, but not in the file" if other[0] in listed else "is in the file, but not listed there"
        raise FormatError(
            f"{shard}: does not match {index.name} in {len(other)} tensor{'s' * (len(other) > 1)}: "
            f"{other[0][:200]!r} {fault}. Copy the files again"
        )


def read_npz(path: Path) -> Tensors:
    """Return all tensors of the archive by name, as float32."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            # Uncompressed, and not larger than the file in total: no archive that expands in memory.
            if any(m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 for m in members):
                raise FormatError(
                    f"{path}: got a compressed or encrypted archive, must be a plain one. Save it as safetensors"
                )
            if sum(m.file_size for m in members) > path.stat().st_size:
                raise FormatError(f"{path}: its entries declare more bytes than the file has. Copy it again")
            if len({m.filename for m in members}) < len(members):
                raise FormatError(f"{path}: two tensors have the same name")
            return {m.filename.removesuffix(".npy"): _read_npy(archive.read(m), m.filename, path) for m in members}
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise FormatError(f"{path}: is not a complete zip archive: {fields.shown(str(error))}. Copy it again") from None


def _read_npy(data: bytes, name: str, path: Path) -> np.ndarray[Any, Any]:
    where = f"{path}: {fields.shown(name)}"
    header = _NPY.match(data[:_MAX_NPY_HEADER])
    if not name.endswith(".npy") or header is None:
        raise FormatError(f"{where}: is not an array of numbers in NumPy's format")
    if (dtype := _DTYPES.get(header["descr"])) is None:
        raise FormatError(
            f"{where}: got dtype {header['descr']!r}, must be one of <f2, <f4, <f8. Save it as safetensors"
        )
    shape = tuple(int(n) for n in header["shape"].split(b",") if n.strip())
    content = data[header.end() :]
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes != len(content) or not content:
        raise FormatError(
            f"{where}: got {len(content)} bytes, but shape {shape} of {dtype} has {num_bytes}. Copy it again"
        )
    x = np.frombuffer(content, dtype).reshape(shape, order="F" if header["fortran"] == b"True" else "C")
    with np.errstate(over="ignore"):
        return x.astype(np.float32)
