"""How exact MLX's products of float32 are on this device."""

from __future__ import annotations

import mlx.core as mx

from dualtune_mlx.card.chips import TF32, tf32_setting

SIZE = 128  # too large for MLX's special kernels for vectors, so that the general one is tried


def describe_products() -> str:
    """Say whether float32 products are computed in float32, which a product shows whose factor TF32 cannot hold."""
    setting = f"{TF32}={tf32_setting()}"
    if are_exact():
        return f"its products are exact ({setting})"
    if tf32_setting() == "0":
        setting += " came too late, after a product of this process: start a new one"
    return f"its products are rounded ({setting})"


def are_exact() -> bool:
    """Return whether 1 + 2⁻¹², two bits more than TF32's mantissa has, is unchanged by a product with 1."""
    factor = mx.full((SIZE, SIZE), 1 + 2**-12, mx.float32)
    return bool(mx.array_equal(factor @ mx.eye(SIZE), factor))
