"""Safetensors files, written without a copy of their tensors: from pieces in memory, or one tensor after another.

The library's own writer makes a copy of all of them, and where there is no memory for it the process panics or hangs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualtune.io.disk import Pieces

# Bytes of a number, by its name in the format, in the order in which the library writes them.
SIZES = {
    "U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2, "I8": 1,
    "U8": 1, "BOOL": 1,
}  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(SIZES)}
_OF_NUMPY = {"float64": "F64", "float32": "F32", "float16": "F16"}


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
