"""Writing weights one after another: MLX's own writer computes all of them and keeps them until the file is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from dualtune.io.tensors import StoredForm, write_model_weights

NAMES = {
    mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.int32: "I32", mx.uint32: "U32", mx.int8: "I8",
    mx.uint8: "U8",
}  # fmt: skip


def write_weights(directory: Path, weights: dict[str, mx.array]) -> None:
    """Write arrays that may not be computed yet, and take each from `weights` when its turn comes.

    Each is computed, written and freed before the next one. Raises OSError if the file cannot be written.
    """
    forms = {name: StoredForm(NAMES[weight.dtype], weight.shape) for name, weight in weights.items()}

    def read(name: str) -> memoryview:
        content: Any = mx.contiguous(weights.pop(name)).reshape(-1).view(mx.uint8)
        return memoryview(content)  # of its own memory, once it is computed

    write_model_weights(directory, forms, read)
