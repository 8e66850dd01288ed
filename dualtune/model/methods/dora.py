"""DoRA: W + ΔW = m ∘ (W + scale · B A) / ‖W + scale · B A‖, with the norm of each row and m [out]. Liu et al., arXiv
2402.09353, equation 5.

What they call a column is a row here, an output: the weight is [out, in], as PEFT and mlx-lm take it too. The norm
follows A and B but is a constant in the gradient (their section 4.3), as in PEFT and in mlx-lm. In training with
dropout, B A alone reads the input after dropout, x̃, as in LoRA and as in mlx-lm:

    y = g ∘ (W x + scale · B A x̃) + b        g = m / ‖W + scale · B A‖

PEFT adds (g - 1) ∘ W x̃ to W x instead, which multiplies by W twice. Without dropout the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualtune.model.methods import lora
from dualtune.model.methods.method import ByPart, Init, Method, Parameter, Shape, Weight

if TYPE_CHECKING:
    import numpy as np

# Engines compute the squared norms of rows as ‖W‖² + 2 s Σ (W Aᵀ) ∘ B + s² Σ (B A Aᵀ) ∘ B, without the matrix B A. A
# sum is taken to be at least this share of ‖W‖², so that the rounding of a row that has all but vanished is not divided
# by; and a norm at least so long, so that a row of zeros stays one.
LEAST_SHARE = 2.0**-20
LEAST_NORM = 1e-15


def shapes(weight: Shape, rank: int) -> dict[str, tuple[int, ...]]:
    return {**lora.shapes(weight, rank), "m": (weight[0],)}


def row_norms(W_OI: np.ndarray) -> np.ndarray:
    """Return the norm of each row, float64 [out]."""
    import numpy as np

    return np.sqrt(np.einsum("oi,oi->o", W_OI, W_OI, dtype=np.float64))


def _with_magnitude(init: Init) -> Init:
    """Return a start of LoRA with m = ‖W‖: where B A is zero nothing changes."""

    def start(weight: Shape, rank: int, scale: float, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
        values = init(weight, rank, scale, rng, frozen)
        return values if frozen is None else {**values, "m": row_norms(frozen()).astype("float32")}

    return start


def delta(values: Mapping[str, np.ndarray], scale: float, frozen: Weight) -> np.ndarray:
    W_OI = frozen().astype("float64")
    V_OI = W_OI + lora.delta(values, scale, frozen)
    return (values["m"].astype("float64") / row_norms(V_OI).clip(LEAST_NORM))[:, None] * V_OI - W_OI


METHOD = Method(
    name="dora",
    title="DoRA",
    parameters=(*lora.METHOD.parameters, Parameter("m", "lora_magnitude_vector", "m")),
    shapes=shapes,
    inits={name: _with_magnitude(init) for name, init in lora.METHOD.inits.items()},
    delta=delta,
    peft_keys={"use_dora": True},
    mlx_type="dora",
)
