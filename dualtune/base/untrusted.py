"""Read untrusted JSON, safetensors and NumPy files, with checks before any large allocation.

A safetensors file is 8 bytes (little-endian N), N bytes of JSON {name: {dtype, shape, data_offsets}}, then the bytes of
the tensors without holes (https://github.com/huggingface/safetensors#format). It is decoded here because its NumPy
binding knows no bfloat16, and because every check of its header names the file and both sizes. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zipfile
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from dualtune.base.errors import FormatError
from dualtune.base.fields import shown
from dualtune.base.files import NotRegular, open_own, open_regular

MAX_HEADER_BYTES = 8 << 20  # an adapter of 100 layers has 0.2 MB, one of all experts of 48 layers of 128 has 6 MB
MAX_DIMENSIONS = 8
MAX_BYTES = 1 << 62  # of a tensor, and of each of its dimensions
# JSON needs up to sixty times its size in memory, most of all with many small values. Together, the two limits keep a
# header under 64 MB; it has 22 such characters per tensor.
MAX_STRUCTURE = 820_000  # quotes, commas, colons and opening brackets
MAX_WIDE_BYTES = 4 << 20  # of a text that is not ASCII, which needs four times its size
MAX_DEPTH = 64
MAX_DIGITS = 40  # of an integer; the state of a random generator has 39
LFS_MAGIC = b"version https://git-lfs"
LFS_ADVICE = "is a git-lfs pointer, not the file itself. Run: git lfs pull"

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a surrogate in JSON; half a character, unless the other half follows
_NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # bfloat16 as raw bits
FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}


class TensorEntry(NamedTuple):
    """One tensor of a header; begin and end are bytes from the end of the header."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def parse_object(data: bytes, where: object, *, strict: bool = True, allowance: int = 1) -> dict[str, Any]:
    """Return the object in a JSON text. Raises FormatError for anything else, and if reading needs too much memory.

    `strict` refuses what Python accepts but other readers treat differently or cannot write again: duplicate keys, NaN
    and Infinity, lone surrogates. The config.json of some models has them. `allowance` multiplies the size limits.
    """
    if data.startswith(LFS_MAGIC):
        raise FormatError(f"{where}: {LFS_ADVICE}")
    # Counted before Python parses it: afterwards the memory is in use already.
    if (size := sum(map(data.count, (b'"', b",", b":", b"[", b"{")))) > (most := allowance * MAX_STRUCTURE):
        raise FormatError(f"{where}: {size} quotes, commas, colons and brackets, at most {most} are allowed")
    if len(data) > (most := allowance * MAX_WIDE_BYTES) and not data.isascii():
        raise FormatError(f"{where}: {len(data)} bytes, at most {most} are allowed if they are not all ASCII")
    hooks: dict[str, Any] = {
        "object_pairs_hook": _unique, "parse_constant": _refuse_constant, "parse_float": _finite,
    }  # fmt: skip
    try:
        value = json.loads(data.decode(), parse_int=_integer, **(hooks if strict else {}))
        if strict and _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FormatError(f"{where}: not valid JSON: half a surrogate pair") from None
    except UnicodeDecodeError:
        raise FormatError(f"{where}: not valid JSON: not UTF-8 text") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise _too_deep(where) from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: got a JSON {type(value).__name__}, must be an object")
    table = cast("dict[str, Any]", value)
    if _is_deep(table):  # printing or copying it would exceed the recursion limit
        raise _too_deep(where)
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key appears twice")
    return table


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:50]} is beyond the range of a float")
    return number


def _integer(text: str) -> int:
    """Read an integer that is a number of something: it can be divided, and shown."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _is_deep(table: dict[str, Any]) -> bool:
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _values(value)]
    return any(_values(value) for value in level)


def _values(value: Any) -> list[Any]:
    """Return the values of an object or a list; [] for anything else."""
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def _too_deep(where: object) -> FormatError:
    return FormatError(f"{where}: nested too deeply, at most {MAX_DEPTH} levels are allowed")


def read_json(
    path: Path, *, max_bytes: int, strict: bool = True, allowance: int = 1, is_own: bool = False
) -> dict[str, Any]:
    """Read the object in a JSON file of at most `max_bytes`. `is_own` as in `open_file`."""
    with open_file(path, is_own=is_own) as file:
        return json_in(file, path, max_bytes=max_bytes, strict=strict, allowance=allowance)


def json_in(
    file: BufferedReader, path: Path, *, max_bytes: int, strict: bool = True, allowance: int = 1
) -> dict[str, Any]:
    """Return the object in an open JSON file."""
    file.seek(0)
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise FormatError(f"{path}: {os.fstat(file.fileno()).st_size} bytes, at most {max_bytes} are allowed")
    return parse_object(data, path, strict=strict, allowance=allowance)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of the file by name, as float32 (bfloat16 and float16 exactly, float64 rounded once).

    Raises FormatError for anything but a whole, well-formed file of floating-point tensors. NaN and Inf pass: the
    caller decides.
    """
    with open_file(path) as file:
        return tensors_in(file, path)


def tensors_in(file: BufferedReader, path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of an open safetensors file."""
    entries = read_header(file, path)[0]
    # The entries are in file order without holes, so that each read starts where the last one ended.
    return {entry.name: _read_tensor(file, entry) for entry in entries}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the notes in the header of a safetensors file that `read_header` has accepted."""
    with open_file(path) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        return parse_object(file.read(header_bytes), f"{path}: header").get("__metadata__") or {}


def sha256_of(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_file(path: Path, *, max_bytes: int | None = None, is_own: bool = False) -> BufferedReader:
    """Open a regular file of at most `max_bytes`. Raises FormatError if it is none, larger, or cannot be read.

    `is_own`: a file of a run directory, which must not be a link.
    """
    try:
        file = os.fdopen(open_own(path, os.O_RDONLY), "rb") if is_own else open_regular(path)
    except NotRegular:
        raise FormatError(f"{path}: is not a file") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    if max_bytes is not None and (size := os.fstat(file.fileno()).st_size) > max_bytes:
        file.close()
        raise FormatError(f"{path}: {size} bytes, at most {max_bytes} are allowed")
    return file


def read_header(
    file: BufferedReader, path: Path, dtype_bits: Mapping[str, int] = FLOAT_BITS
) -> tuple[list[TensorEntry], int]:
    """Return the entries in file order, checked to cover the rest of the file exactly, and where that rest begins."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        raise FormatError(f"{path}: 0 bytes: a write or a download was cut off. Copy the file again.")
    file.seek(0)
    start = file.read(len(LFS_MAGIC))
    if start == LFS_MAGIC:
        raise FormatError(f"{path}: {LFS_ADVICE}")
    header_bytes = int.from_bytes(start[:8], "little")
    if size >= 8 and header_bytes > MAX_HEADER_BYTES:
        raise FormatError(
            f"{path}: announces a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed. "
            "This is not a safetensors file, or it is damaged."
        )
    if size < 8 + header_bytes:
        raise _truncated(path, got=size, expected=8 + header_bytes)

    # Every size is known by now, so nothing is read that the file does not have.
    file.seek(8)
    table = parse_object(file.read(header_bytes), f"{path}: header")
    notes = table.pop("__metadata__", None)  # null, as MLX writes it, or strings
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(note, str) for note in _values(notes))):
        raise FormatError(f"{path}: header: __metadata__ must be an object of strings")
    entries = sorted(_parse_entry(name, info, path, dtype_bits) for name, info in table.items())
    expected = 8 + header_bytes + max((entry.end for entry in entries), default=0)
    if size < expected:
        raise _truncated(path, got=size, expected=expected)
    # In file order each tensor begins where the last one ends: then none overlaps, and no bytes hide between them.
    position = 0
    for entry in entries:
        if entry.begin != position:
            fault = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise FormatError(
                f"{path}: tensor {entry.name[:200]!r} {fault} (offset {entry.begin}, expected {position})"
            )
        position = entry.end
    if size > expected:
        raise FormatError(f"{path}: {size} bytes, expected {expected}: bytes after the last tensor")
    return entries, 8 + header_bytes


def _parse_entry(name: str, info: Any, path: Path, dtype_bits: Mapping[str, int]) -> TensorEntry:
    match info:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise FormatError(f"{path}: tensor {name[:200]!r}: the header needs dtype, shape and two data_offsets")
    where = f"{path}: tensor {name[:200]!r}"
    if dtype not in dtype_bits:
        raise FormatError(f"{where}: got dtype {dtype[:20]!r}, must be one of {', '.join(dtype_bits)}")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n <= MAX_BYTES for n in (*shape, begin, end)):
        got = f"shape {str(shape)[:100]} and offsets {str(begin)[:50]}..{str(end)[:50]}"
        raise FormatError(f"{where}: got {got}, must be a few integers >= 0")
    num_bytes, spare_bits = divmod(math.prod(shape) * dtype_bits[dtype], 8)
    if spare_bits or end - begin != num_bytes:
        raise FormatError(
            f"{where}: offsets {begin}..{end} hold {end - begin} bytes, "
            f"shape {tuple(shape)} of {dtype} needs {num_bytes}"
        )
    if not num_bytes:
        raise FormatError(f"{where}: got shape {tuple(shape)}, which is empty")
    return TensorEntry(begin, end, name, dtype, tuple(shape))


def _read_tensor(file: BufferedReader, entry: TensorEntry) -> np.ndarray:
    raw = np.fromfile(file, _NUMPY_DTYPES[entry.dtype], count=math.prod(entry.shape)).reshape(entry.shape)
    if entry.dtype == "BF16":  # the upper half of a float32
        return (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # a float64 too large becomes Inf, which the caller reports
        return raw.astype(np.float32, copy=False)


def _truncated(path: Path, *, got: int, expected: int) -> FormatError:
    return FormatError(f"{path}: {got} bytes, expected {expected}: the file is truncated. Copy it again.")


# ----------------------------------------------------------------------------------------------------------------------
# The NumPy archive of an old mlx-lm: a zip archive of one .npy file for each tensor.
#
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


def read_npz(path: Path) -> dict[str, np.ndarray]:
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
        raise FormatError(f"{path}: is not a complete zip archive: {shown(str(error))}. Copy it again") from None


def _read_npy(data: bytes, name: str, path: Path) -> np.ndarray[Any, Any]:
    where = f"{path}: {shown(name)}"
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
