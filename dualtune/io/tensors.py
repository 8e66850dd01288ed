"""The content of a safetensors file, in pieces that are not copied: saving needs no memory beside the tensors.

The library's own writer makes a copy of all of them, and where there is no memory for it the process panics or hangs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dualtune.io.disk import Pieces

_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class Stored(NamedTuple):
    """What the header says of a tensor."""

    dtype: str  # NumPy's or torch's name
    shape: Sequence[int]

    @property
    def itemsize(self) -> int:
        return _BYTES[_NAMES[self.dtype]]


def safetensors_header(
    tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return the header of a file with these tensors, and their names in the order in which the values follow.

    The widest dtype comes first, then names in order: https://github.com/huggingface/safetensors#format.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    order, end = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)), 0
    for name in order:
        stored = tensors[name]
        start, end = end, end + math.prod(stored.shape) * stored.itemsize
        header[name] = {"dtype": _NAMES[stored.dtype], "shape": [*stored.shape], "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def safetensors_pieces(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Pieces:
    """Return the bytes that `safetensors.numpy.save` returns, as the header and a view of each tensor."""
    header, order = safetensors_header({name: Stored(x.dtype.name, x.shape) for name, x in tensors.items()}, metadata)
    return [header, *(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data for name in order)]
