"""The content of a safetensors file, in pieces that are not copied: saving needs no memory beside the tensors.

The library's own writer makes a copy of all of them, and where there is no memory for it the process panics or hangs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from dualtune.io.disk import Pieces

_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16"}


def safetensors_pieces(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Pieces:
    """Return the bytes that `safetensors.numpy.save` returns, as the header and a view of each tensor.

    The widest dtype comes first, then names in order: https://github.com/huggingface/safetensors#format.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    views, end = list[memoryview](), 0
    for name, x in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, end = end, end + x.nbytes
        header[name] = {"dtype": _NAMES[x.dtype.name], "shape": list(x.shape), "data_offsets": [start, end]}
        views.append(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *views]
