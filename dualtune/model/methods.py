"""How linear layers are adapted, as data: the trained parameters of a layer, their names, shapes and initial values.

A new method is a record in METHODS (decision 0019). Without NumPy at import time, because the config's schema imports
the names from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, int]  # (out, in) of the frozen weight


class Parameter(NamedTuple):
    """One trained tensor of an adapted layer, and its name after the layer's path."""

    part: str  # here: "A"
    peft: str  # in PEFT's file and everywhere in the core: "lora_A.weight"
    mlx: str  # in mlx-lm's file, where a matrix is transposed: "lora_a"


@dataclass(frozen=True, slots=True)
class Method:
    """How a linear layer is adapted: y = (W + ΔW) x, with ΔW a function of the trained parameters.

    Fresh parameters are neutral: ΔW = 0.
    """

    name: str  # the value of `adapter.method` in the config, and the file name of its layer in a backend
    title: str  # for display
    parameters: tuple[Parameter, ...]
    # Shape of W, rank -> the shape of each parameter, by part.
    shapes: Callable[[Shape, int], dict[str, tuple[int, ...]]]
    # Shape of W, rank, the module's own random stream -> the initial values, float32, by part.
    initial: Callable[[Shape, int, np.random.Generator], dict[str, np.ndarray]]

    def count(self, weight: Shape, rank: int) -> int:
        """Return the number of trainable parameters for a weight."""
        return sum(math.prod(shape) for shape in self.shapes(weight, rank).values())

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(parameter.part for parameter in self.parameters)


def _lora_initial(weight: Shape, rank: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A ~ U(±1/√in), which is Kaiming-uniform with a=√5 as in PEFT and mlx-lm, and B = 0."""
    import numpy as np

    out_dim, in_dim = weight
    bound = 1.0 / math.sqrt(in_dim)
    A_rI = rng.uniform(-bound, bound, (rank, in_dim)).astype(np.float32)
    return {"A": A_rI, "B": np.zeros((out_dim, rank), np.float32)}


# ΔW = scale · B A (Hu et al., arXiv 2106.09685). The scale is alpha / rank, or alpha / √rank (rsLoRA, Kalajdzievski,
# arXiv 2312.03732): `AdapterSpec.scale`.
LORA = Method(
    name="lora",
    title="LoRA",
    parameters=(Parameter("A", "lora_A.weight", "lora_a"), Parameter("B", "lora_B.weight", "lora_b")),
    shapes=lambda weight, rank: {"A": (rank, weight[1]), "B": (weight[0], rank)},
    initial=_lora_initial,
)
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in (LORA,)})

# Full fine-tuning: all parameters of the model are trained, under their own names. No layer is adapted, so it has no
# record.
FULL = "full"
NAMES = (*METHODS, FULL)  # the values of adapter.method
