"""Safetensors files, written without a copy of their tensors: from pieces in memory, or one tensor after another.

The library's own writer makes a copy of all of them, and where there is no memory for it the process panics or hangs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualtune.base.files import Pieces, json_bytes

SHARD_BYTES = 50 * 10**9  # of tensors in a file of a model

# Bytes of a number, by its name in the format, in the order in which the library writes them.
SIZES = {
    "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1, "F8_E8M0": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(SIZES)}
_OF_NUMPY = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8"}
# NumPy has no bfloat16: the bits of one are the upper half of a float32.
FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F64": np.dtype("<f8")}


@dataclass(frozen=True, slots=True)
class StoredForm:
    """The dtype (one of `SIZES`) and the shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return SIZES[self.dtype] * math.prod(self.shape)


def safetensors_pieces(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Pieces:
    """Return the bytes that `safetensors.numpy.save` returns, as the header and a view of each tensor."""
    forms = {name: StoredForm(_OF_NUMPY[x.dtype.name], x.shape) for name, x in tensors.items()}
    return [_header(forms, metadata), *(bytes_of(tensors[name]) for name in _ordered(forms))]


def write_safetensors(
    file: Path,
    forms: Mapping[str, StoredForm],
    read: Callable[[str], memoryview],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Create a file as the library writes it, with one tensor in memory at a time: the bytes that `read(name)` returns.

    Raises ValueError if they are not as many as the form of the tensor says, OSError if the file cannot be written.
    """
    with file.open("xb") as stream:
        stream.write(_header(forms, metadata))
        for name in _ordered(forms):
            content = read(name)
            if content.nbytes != forms[name].num_bytes:
                raise ValueError(f"{name}: got {content.nbytes} bytes, the header says {forms[name].num_bytes}")
            stream.write(content)
            del content  # before the next one is read


def safetensors_of_files(
    forms: Mapping[str, StoredForm], pieces: Callable[[str], Iterable[bytes]], metadata: Mapping[str, str]
) -> Iterator[bytes]:
    """Yield the bytes of a file as the library writes it; `pieces(name)` yields those of a tensor."""
    yield _header(forms, metadata)
    for name in _ordered(forms):
        yield from pieces(name)


def write_model_weights(
    directory: Path,
    forms: Mapping[str, StoredForm],
    read: Callable[[str], memoryview],
    *,
    most_bytes: int | None = None,
) -> None:
    """Write the weights of a model directory, as `write_safetensors` does: model.safetensors, or numbered shards.

    With more than `most_bytes` (SHARD_BYTES) of tensors, each shard holds as many as fit, and an index names the shard
    of each: the hub refuses larger files. A tensor is never split.
    """
    metadata = {"format": "pt"}
    shards = _shards(forms, SHARD_BYTES if most_bytes is None else most_bytes)
    if len(shards) < 2:
        write_safetensors(directory / "model.safetensors", forms, read, metadata)
        return
    places = dict[str, str]()
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file, {name: forms[name] for name in names}, read, metadata)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(form.num_bytes for form in forms.values())}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_bytes(json_bytes(index))


def _shards(forms: Mapping[str, StoredForm], most_bytes: int) -> list[list[str]]:
    """Return the names of each shard, filled in the order in which a file holds them."""
    shards, free_bytes = list[list[str]](), 0
    for name in _ordered(forms):
        if not shards or forms[name].num_bytes > free_bytes:
            shards.append([])
            free_bytes = most_bytes
        shards[-1].append(name)
        free_bytes -= forms[name].num_bytes
    return shards


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of an array in the order of its elements, without a copy if they lie in it."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _ordered(forms: Mapping[str, StoredForm]) -> list[str]:
    """The widest dtype comes first, then names in order: https://github.com/huggingface/safetensors#format."""
    return sorted(forms, key=lambda name: (_RANK[forms[name].dtype], name))


def _header(forms: Mapping[str, StoredForm], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in _ordered(forms):
        form = forms[name]
        start, end = end, end + form.num_bytes
        header[name] = {"dtype": form.dtype, "shape": list(form.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def floats_of(data: bytes | np.ndarray, dtype: str) -> np.ndarray:
    """Return the numbers of a tensor (one of FLOATS) from its bytes: flat, in float32, those of float64 in float64."""
    values = np.frombuffer(data, FLOATS[dtype])
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64 if dtype == "F64" else np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the nearest number of a dtype, ties to even, as the frameworks do; bfloat16 as its bits in uint16."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return values.astype(FLOATS[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), upper).astype(np.uint16)
