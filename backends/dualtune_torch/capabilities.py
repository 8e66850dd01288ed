"""What the torch backend honours, to be read without torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAPABILITIES: Mapping[str, frozenset[Any]] = {
    "model.dtype": frozenset({"auto", "float32", "bfloat16", "float16"}),
    "model.quantization": frozenset({"auto", "none", "nf4", "affine4", "affine8"}),
    "model.init": frozenset({"pretrained", "random"}),
    "model.kernels": frozenset({"auto", "fused", "reference"}),
    "data.packing": frozenset({False, True}),
    "train.optimizer": frozenset({"adamw", "sgd"}),
    "memory.checkpointing": frozenset({"auto", "none"}),
    "memory.sharding": frozenset({"auto", "none", "full"}),
}
