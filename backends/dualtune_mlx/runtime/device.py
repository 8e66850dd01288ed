"""The device that MLX computes on."""

from __future__ import annotations

import mlx.core as mx


def chip() -> str | None:
    """Return the name of the GPU that computes, such as "Apple M4 Max"; None if a CPU does."""
    if not mx.metal.is_available() or mx.default_device().type != mx.DeviceType.gpu:
        return None
    return str(mx.device_info()["device_name"])
