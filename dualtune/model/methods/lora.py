"""LoRA: ΔW = scale · B A, with A [rank, in] and B [out, rank]. Hu et al., arXiv 2106.09685.

The scale is alpha / rank, or alpha / √rank (rsLoRA, Kalajdzievski, arXiv 2312.03732): see `dualtune.model.adapter`.

A start may be made of the weight: B₀ A₀ is then a part of W, and in the papers leaves it, so that adapter and base
together are W. Here the base stays as it is, and the start is kept beside what is trained, with the opposite sign:

    ΔW = scale · (B A − B₀ A₀) = scale · [B, −B₀] [A; A₀]

which is LoRA of twice the rank, in every file too, half of which is never updated.
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


def kaiming(weight: Shape, rank: int, scale: float, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
    """A ~ U(±1/√in), which is Kaiming-uniform with a=√5 as in PEFT and mlx-lm, and B = 0."""
    bound = 1.0 / math.sqrt(weight[1])
    return _with_zero_B(rng.uniform(-bound, bound, (rank, weight[1])), weight)


def normal(weight: Shape, rank: int, scale: float, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
    """A ~ N(0, 0.02²), the usual deviation of a transformer's weights (Radford et al., GPT, 2018), and B = 0."""
    return _with_zero_B(rng.normal(0.0, 0.02, (rank, weight[1])), weight)


def gaussian(weight: Shape, rank: int, scale: float, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
    """A ~ N(0, 1 / rank²), PEFT's start of that name, and B = 0."""
    return _with_zero_B(rng.normal(0.0, 1 / rank, (rank, weight[1])), weight)


def pissa(weight: Shape, rank: int, scale: float, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
    """scale · B₀ A₀ is the best approximation of W of this rank, U S Vᵀ, with √(S / scale) in both factors.

    Meng et al., PiSSA, arXiv 2404.02948, equations 2 and 3.
    """
    import numpy as np

    if frozen is None:
        return {}
    U_Or, S_r, V_rI = largest_singular(frozen(), rank, rng)
    root_r = np.sqrt(S_r / scale)
    return _with_opposite(root_r[:, None] * V_rI, U_Or * root_r)


def olora(weight: Shape, rank: int, scale: float, rng: np.random.Generator, frozen: Weight | None) -> ByPart:
    """B₀ and A₀ are the first columns of Q and rows of R of W = Q R, with a diagonal of R that is not negative.

    Büyükakyüz, OLoRA, arXiv 2406.01775, algorithm 1. The first columns of Q are those of the first columns of W.
    """
    import numpy as np

    if frozen is None:
        return {}
    W_OI = frozen().astype(np.float64)
    Q_Or, R_rr = np.linalg.qr(W_OI[:, :rank])
    Q_Or = Q_Or * np.where(np.diag(R_rr) < 0, -1.0, 1.0)
    return _with_opposite(Q_Or.T @ W_OI, Q_Or)


EXACT_UP_TO = 512  # features on the shorter side: a larger matrix is searched at random
OVERSAMPLING, POWER_ITERATIONS = 10, 4


def largest_singular(
    W_OI: np.ndarray, rank: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (U [out, rank], S, Vᵀ [rank, in]) of the largest singular values, float64.

    Of a large matrix by the randomized subspace iteration of Halko, Martinsson & Tropp, arXiv 0909.4061, algorithms 4.4
    and 5.1. The largest entry of each column of U is positive, so that signs do not depend on a library.
    """
    import numpy as np

    basis_OR = None
    if min(W_OI.shape) > EXACT_UP_TO:
        probes_IR = rng.normal(size=(W_OI.shape[1], rank + OVERSAMPLING)).astype(W_OI.dtype)
        basis_OR = np.linalg.qr(W_OI @ probes_IR)[0]
        for _ in range(POWER_ITERATIONS):
            basis_OR = np.linalg.qr(W_OI @ np.linalg.qr(W_OI.T @ basis_OR)[0])[0]
    small = W_OI if basis_OR is None else basis_OR.T @ W_OI
    left, sizes, right_RI = np.linalg.svd(small.astype(np.float64), full_matrices=False)
    left_Or = (left if basis_OR is None else basis_OR @ left)[:, :rank]
    signs_r = np.sign(left_Or[np.abs(left_Or).argmax(0), np.arange(rank)])
    return left_Or * signs_r, sizes[:rank], right_RI[:rank] * signs_r[:, None]


def _with_opposite(A_rI: np.ndarray, B_Or: np.ndarray) -> ByPart:
    """Return [A; A] and [B, -B]: the trained start, and its frozen negative."""
    import numpy as np

    A_rI, B_Or = A_rI.astype(np.float32), B_Or.astype(np.float32)
    return {"A": np.concatenate([A_rI, A_rI]), "B": np.concatenate([B_Or, -B_Or], axis=1)}


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
    inits={"kaiming": kaiming, "normal": normal, "gaussian": gaussian, "pissa": pissa, "olora": olora},
    delta=delta,
    peft_keys={},
    mlx_type="lora",
)
