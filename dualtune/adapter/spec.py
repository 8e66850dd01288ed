"""What a LoRA adapter is: its hyperparameters, the names and shapes of its tensors, and how it is drawn.

The canonical form everywhere in the core, on both backends and in checkpoints is PEFT's: for an adapted linear layer
`y = W x + scale · B (A x)`, the dictionary holds `base_model.model.<module>.lora_A.weight` with shape [rank, in] and
`….lora_B.weight` with shape [out, rank], both float32.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

# Part of what an adapter is, in a file of their own because they need no NumPy.
from dualtune.adapter.targets import ALL_LINEAR as ALL_LINEAR
from dualtune.adapter.targets import OUTPUT_HEAD as OUTPUT_HEAD
from dualtune.adapter.targets import Shapes
from dualtune.adapter.targets import is_target as is_target
from dualtune.adapter.targets import select_modules as select_modules

Tensors = dict[str, np.ndarray]

PREFIX = "base_model.model."
_NAME = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight$")


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The hyperparameters of an adapter. `targets` are module names: a path, or the end of one (`q_proj`)."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def tensor_name(module: str, part: str) -> str:
    """The PEFT name of lora_A (`part="A"`) or lora_B of a module path."""
    return f"{PREFIX}{module}.lora_{part}.weight"


def parse_name(name: str) -> tuple[str, str] | None:
    """(module path, "A" or "B") of a PEFT tensor name, or None if it is not one of a plain LoRA linear layer."""
    match = _NAME.match(name)
    return (match["module"], match["part"]) if match else None


def modules_of(tensors: Iterable[str]) -> list[str]:
    """The sorted module paths that the tensor names speak of."""
    return sorted({parsed[0] for name in tensors if (parsed := parse_name(name))})


def init_adapter(shapes: Shapes, rank: int, seed: int) -> Tensors:
    """Draw a fresh adapter: A ~ U(±1/√in), which is Kaiming-uniform with a=√5 as in PEFT and mlx-lm, and B = 0.

    Every module has a random stream of its own, keyed by (seed, module path), so that the numbers do not depend on
    which other modules are adapted, nor on the order in which a backend lists them.
    """
    tensors: Tensors = {}
    for module, (out_dim, in_dim) in shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(module.encode())])
        bound = 1.0 / np.sqrt(in_dim)
        tensors[tensor_name(module, "A")] = rng.uniform(-bound, bound, (rank, in_dim)).astype(np.float32)
        tensors[tensor_name(module, "B")] = np.zeros((out_dim, rank), np.float32)
    return tensors
