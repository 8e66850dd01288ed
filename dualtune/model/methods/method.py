"""The interface of a method: its trained parameters for one linear layer, and the update that follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, int]  # (out, in) of the frozen weight
ByPart = dict[str, "np.ndarray"]
Weight = Callable[[], "np.ndarray"]  # returns the frozen weight W, float32 [out, in]; dequantized only when called


# Shape of W, rank, scale, the module's own random stream, W -> the initial values, float32, by part. Without W, the
# parts that depend on it are omitted.
Init = Callable[[Shape, int, float, "np.random.Generator", Weight | None], ByPart]


class Parameter(NamedTuple):
    """One trained tensor of an adapted layer, and its name after the layer's path."""

    part: str  # here: "A"
    peft: str  # in PEFT's file and everywhere in the core: "lora_A.weight"
    mlx: str  # in mlx-lm's file, where a matrix is transposed: "lora_a"


@dataclass(frozen=True, slots=True)
class Method:
    """How a linear layer is adapted: y = (W + ΔW) x, with ΔW a function of the trained parameters and of W.

    Fresh parameters are neutral: ΔW = 0.
    """

    name: str  # the value of `adapter.method` in the config, and the file name of its layer in a backend
    title: str  # for display
    parameters: tuple[Parameter, ...]
    # Shape of W, rank -> the shape of each parameter, by part.
    shapes: Callable[[Shape, int], dict[str, tuple[int, ...]]]
    inits: Mapping[str, Init]  # by the value of `adapter.init`
    # The parameters by part, the scale, W -> ΔW, float64 [out, in].
    delta: Callable[[Mapping[str, np.ndarray], float, Weight], np.ndarray]
    peft_keys: Mapping[str, object]  # its keys in PEFT's adapter_config.json, in addition to those of LoRA
    mlx_type: str  # fine_tune_type in mlx-lm's config

    def count(self, weight: Shape, rank: int) -> int:
        """Return the number of trainable parameters for a weight."""
        return sum(math.prod(shape) for shape in self.shapes(weight, rank).values())

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(parameter.part for parameter in self.parameters)
