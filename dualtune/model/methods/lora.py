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


def initial(weight: Shape, rank: int, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
    """A ~ U(±1/√in), which is Kaiming-uniform with a=√5 as in PEFT and mlx-lm, and B = 0."""
    import numpy as np

    out_dim, in_dim = weight
    bound = 1.0 / math.sqrt(in_dim)
    A_rI = rng.uniform(-bound, bound, (rank, in_dim)).astype(np.float32)
    return {"A": A_rI, "B": np.zeros((out_dim, rank), np.float32)}


def delta(values: Mapping[str, np.ndarray], scale: float, frozen: Weight) -> np.ndarray:
    return scale * (values["B"].astype("float64") @ values["A"].astype("float64"))


METHOD = Method(
    name="lora",
    title="LoRA",
    parameters=(Parameter("A", "lora_A.weight", "lora_a"), Parameter("B", "lora_B.weight", "lora_b")),
    shapes=shapes,
    initial=initial,
    delta=delta,
    peft_keys={},
    mlx_type="lora",
)
