"""How much memory MLX may hold, in arrays and in the buffers that it keeps after arrays are freed."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from dualtune_mlx.card.memory import METAL_RESERVE


def keep_in_memory() -> None:
    """Keep what the GPU uses in physical memory, up to the size that Metal recommends, as mlx-lm's trainer does."""
    mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


def limit_memory(limit_bytes: int | None, reused_bytes: int | None, *, on_metal: bool) -> None:
    """Bound what MLX holds. None lifts the limit of an earlier engine.

    `limit_bytes`: what the run may use. On Metal, arrays and cached buffers together stay below it, less what is no
    array: the allocator frees cached buffers before it makes a new one (mlx 0.32, mlx/backend/metal/allocator.cpp:
    malloc). On a CPU, MLX only waits for pending work above it.
    `reused_bytes`: what a step allocates and frees. A step cannot reuse more, and Metal's default would keep nearly all
    memory that the system gives to the GPU, wired. A CPU's default (32 MB) stays.
    """
    memory, cached = _limits_at_first()
    if limit_bytes is not None:
        memory = max(0, limit_bytes - METAL_RESERVE) if on_metal else limit_bytes
    if on_metal and reused_bytes is not None:
        cached = min(cached, reused_bytes)
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cached)


@cache
def _limits_at_first() -> tuple[int, int]:
    """MLX's own limits for memory and cache. Only setting one returns it."""
    memory, cached = mx.set_memory_limit(0), mx.set_cache_limit(0)
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cached)
    return memory, cached
