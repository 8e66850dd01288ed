"""What a method is: the parameters that it trains for one linear layer, and the update that they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, int]  # (out, in) of the frozen weight
ByPart = dict[str, "np.ndarray"]
Weight = Callable[[], "np.ndarray"]  # the frozen weight W, float32 [out, in]; it is only unpacked if this is called


class Parameter(NamedTuple):
    """One trained tensor of an adapted layer, and what it is called behind the layer's path."""

    part: str  # here: "A"
    peft: str  # in PEFT's file and everywhere in the core: "lora_A.weight"
    mlx: str  # in mlx-lm's file, where a matrix is transposed: "lora_a"


@dataclass(frozen=True, slots=True)
class Method:
    """How a linear layer is adapted: y = (W + ΔW) x, with ΔW a function of the trained parameters and of W.

    A fresh set of parameters is the neutral one: ΔW = 0.
    """

    name: str  # as `adapter.method` of the config has it, and the file of its layer in a backend
    title: str  # as people write it
    parameters: tuple[Parameter, ...]
    # Shape of W, rank -> the shape of each parameter, by part.
    shapes: Callable[[Shape, int], dict[str, tuple[int, ...]]]
    # Shape of W, rank, the module's own random stream, W -> the first values, float32, by part. Without W those parts
    # are left out that are a function of it.
    initial: Callable[[Shape, int, np.random.Generator, Weight | None], ByPart]
    # The parameters by part, the scale, W -> ΔW, float64 [out, in].
    delta: Callable[[Mapping[str, np.ndarray], float, Weight], np.ndarray]
    peft_keys: Mapping[str, object]  # what marks it in PEFT's adapter_config.json, beside the keys of LoRA
    mlx_type: str  # fine_tune_type of mlx-lm's

    def count(self, weight: Shape, rank: int) -> int:
        """How many numbers are trained for a weight."""
        return sum(math.prod(shape) for shape in self.shapes(weight, rank).values())

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(parameter.part for parameter in self.parameters)
