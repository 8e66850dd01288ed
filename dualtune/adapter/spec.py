"""What an adapter is: its hyperparameters, the names of its tensors, and their initial values.

The core, both backends and checkpoints all use PEFT's form: for a linear layer with LoRA, `y = W x + scale · B (A x)`,
the dictionary holds `base_model.model.<module>.lora_A.weight` with shape [rank, in] and `….lora_B.weight` with shape
[out, rank], both float32. The method decides which tensors a layer has (`dualtune.adapter.methods`).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from dualtune.adapter.methods import FULL, METHODS
from dualtune.adapter.methods.method import Method

# Also part of this module, in a separate file because it needs no NumPy.
from dualtune.adapter.targets import ALL_LINEAR as ALL_LINEAR
from dualtune.adapter.targets import OUTPUT_HEAD as OUTPUT_HEAD
from dualtune.adapter.targets import Shapes
from dualtune.adapter.targets import is_target as is_target
from dualtune.adapter.targets import lacks as lacks
from dualtune.adapter.targets import select_modules as select_modules

Tensors = dict[str, np.ndarray]

Scaling = Literal["standard", "rank_stabilized"]

PREFIX = "base_model.model."
_PARTS = {parameter.peft: parameter.part for method in METHODS.values() for parameter in method.parameters}
_NAME = re.compile(rf"^base_model\.model\.(?P<module>.+)\.(?P<end>{'|'.join(map(re.escape, _PARTS))})$")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The hyperparameters of an adapter. `targets` are module names: a path, or the end of one (`q_proj`)."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    scaling: Scaling = "standard"
    method: str = "lora"  # one of `dualtune.adapter.methods.NAMES`

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / divisor(self.rank, self.scaling)

    @property
    def trains_model(self) -> bool:
        """Whether the parameters of the model itself are trained. Nothing else in the spec has a meaning then."""
        return self.method == FULL

    @property
    def method_spec(self) -> Method:
        return METHODS[self.method]


def divisor(rank: int, scaling: Scaling) -> float:
    """Return the divisor of alpha in the scale: the rank, or its square root (rsLoRA, arXiv 2312.03732)."""
    return math.sqrt(rank) if scaling == "rank_stabilized" else rank


def tensor_name(module: str, part: str, method: str = "lora") -> str:
    """Return the canonical name, which is PEFT's, for a part ("A", "B", …) of a module path."""
    return next(f"{PREFIX}{module}.{p.peft}" for p in METHODS[method].parameters if p.part == part)


def parse_name(name: str) -> tuple[str, str] | None:
    """Return (module path, part) of a canonical name; None if no method has such a name."""
    match = _NAME.match(name)
    return (match["module"], _PARTS[match["end"]]) if match else None


def modules_of(tensors: Iterable[str]) -> list[str]:
    """Return the sorted module paths in the tensor names."""
    return sorted({parsed[0] for name in tensors if (parsed := parse_name(name))})


def init_adapter(
    shapes: Shapes, rank: int, seed: int, *, method: str = "lora", weight: Callable[[str], np.ndarray] | None = None
) -> Tensors:
    """Return a fresh adapter, which changes nothing yet: the method's initial values for each module.

    `weight` returns the frozen weight [out, in] of a module, float32; without it, tensors that depend on it are
    omitted. Every module has a separate random stream, keyed by (seed, module path), so that the numbers depend neither
    on the other adapted modules nor on their order in a backend.
    """
    tensors: Tensors = {}
    for module, shape in shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(module.encode())])
        frozen = partial(weight, module) if weight else None
        values = METHODS[method].initial(shape, rank, rng, frozen)
        tensors |= {tensor_name(module, part, method): value for part, value in values.items()}
    return tensors
