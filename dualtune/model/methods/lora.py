"""LoRA: ΔW = scale · B A, with A [rank, in] and B [out, rank]. Hu et al., arXiv 2106.09685.

The scale is alpha / rank, or alpha / √rank (rsLoRA, Kalajdzievski, arXiv 2312.03732): see `dualtune.model.adapter`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualtune.model.methods.method import ByPart, Method, Parameter, Shape, Weight

if TYPE_CHECKING:
    import numpy as np


def shapes(weight: Shape, rank: int) -> dict[str, tuple[int, ...]]:
    out_dim, in_dim = weight
    return {"A": (rank, in_dim), "B": (out_dim, rank)}


def kaiming(weight: Shape, rank: int, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
    """A ~ U(±1/√in), which is Kaiming-uniform with a=√5 as in PEFT and mlx-lm, and B = 0."""
    bound = 1.0 / math.sqrt(weight[1])
    return _with_zero_B(rng.uniform(-bound, bound, (rank, weight[1])), weight)


def normal(weight: Shape, rank: int, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
    """A ~ N(0, 0.02²), the usual deviation of a transformer's weights (Radford et al., GPT, 2018), and B = 0."""
    return _with_zero_B(rng.normal(0.0, 0.02, (rank, weight[1])), weight)


def _with_zero_B(A_rI: np.ndarray, weight: Shape) -> ByPart:
    import numpy as np

    return {"A": A_rI.astype(np.float32), "B": np.zeros((weight[0], A_rI.shape[0]), np.float32)}


def delta(values: Mapping[str, np.ndarray], scale: float, frozen: Weight) -> np.ndarray:
    return scale * (values["B"].astype("float64") @ values["A"].astype("float64"))


METHOD = Method(
    name="lora",
    title="LoRA",
    parameters=(Parameter("A", "lora_A.weight", "lora_a"), Parameter("B", "lora_B.weight", "lora_b")),
    shapes=shapes,
    inits={"kaiming": kaiming, "normal": normal},
    delta=delta,
    peft_keys={},
    mlx_type="lora",
)
