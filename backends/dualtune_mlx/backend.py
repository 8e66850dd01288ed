"""The MLX backend: which devices and values it honours, and how it builds an engine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import psutil

from dualtune.base.errors import ConfigError
from dualtune.base.world import World
from dualtune.engine.backend import DeviceInfo, LoadRequest, MemoryStats, Profile, loading
from dualtune_mlx import layer
from dualtune_mlx.card import CARD
from dualtune_mlx.distributed import world
from dualtune_mlx.kernels.attention import attention_works
from dualtune_mlx.profile import profile
from dualtune_mlx.runtime import check_features, check_order, chip, keep_in_memory, limit_memory

if TYPE_CHECKING:
    from dualtune_mlx.engine import MlxEngine

DEVICES = ("auto", "cpu")
# In the messages of MLX's errors for memory that Metal could not allocate. On a CPU there is no error: the process ends
# with SIGSEGV.
SHORTAGES = ("[malloc] Unable to allocate", "[metal::malloc]", "kIOGPUCommandBufferCallbackErrorOutOfMemory")
# macOS ends work that keeps the GPU from the screen for too long. The same work would take as long
# again, so it counts as a shortage: smaller micro-batches are shorter work.
TOO_LONG = (
    "kIOGPUCommandBufferCallbackErrorImpactingInteractivity", "Impacting Interactivity",
    "kIOGPUCommandBufferCallbackErrorTimeout", "Caused GPU Timeout Error",
)  # fmt: skip

DEVICE_FAULT = "[METAL] Command buffer execution failed"  # such as a GPU that was reset


@cache
def _machine_bytes() -> int:
    return psutil.virtual_memory().total


class MlxBackend:
    """See `dualtune.engine.backend.Backend`."""

    name = CARD.name
    # For `dualtune.engine.kernels`.
    linear_shapes = staticmethod(layer.linear_shapes)
    add_lora_layers = staticmethod(layer.add_layers)
    lora_layers = staticmethod(layer.lora_layers)

    def __init__(self, device: str = "auto") -> None:
        if device not in DEVICES:
            raise ConfigError(f"device: got '{device}', the backend 'mlx' has: {', '.join(DEVICES)}")
        check_features()
        if device == "cpu":
            mx.set_default_device(mx.cpu)
        elif mx.metal.is_available():
            keep_in_memory()

    def capabilities(self) -> Mapping[str, frozenset[Any]]:
        return CARD.capabilities(self.devices()[0].kind)

    def devices(self) -> list[DeviceInfo]:
        memory = _machine_bytes()  # unified on Apple silicon
        if mx.metal.is_available():
            return [DeviceInfo(str(mx.device_info()["device_name"]), "metal", memory)]
        return [DeviceInfo(platform.processor() or platform.machine(), "cpu", memory)]

    def memory(self) -> MemoryStats:
        used = mx.get_active_memory()
        peak = max(used, mx.get_peak_memory())  # which a reset sets to 0
        return MemoryStats(used, peak, _machine_bytes(), mx.get_cache_memory())

    def reset_peak_memory(self) -> None:
        mx.reset_peak_memory()

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, MemoryError):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in SHORTAGES + TOO_LONG)

    def is_device_fault(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and DEVICE_FAULT in str(error) and not self.is_out_of_memory(error)

    def load(self, request: LoadRequest) -> MlxEngine:
        # Late, after check_features: mlx-lm does not import beside an MLX that is too old for it.
        from dualtune_mlx.engine import MlxEngine
        from dualtune_mlx.model import load_base, refuse_beyond_window, with_own_modules

        limit_memory(request.memory_limit_bytes, request.reused_bytes, on_metal=chip() is not None)
        refuse_beyond_window(request)
        with loading(self, request.model_dir, "mlx-lm"):
            model, description = request.shared(lambda: load_base(request))
            if request.shared_base is not None:
                model = with_own_modules(model)
            if request.deterministic:
                check_order(model)
            return MlxEngine(model, request, description)  # which computes with the model for the first time

    def world(self) -> World:
        return world()

    def synchronize(self) -> None:
        mx.synchronize()

    def matmul(self, size: int, dtype: str) -> Callable[[], object]:
        a, b = (mx.random.normal((size, size)).astype(getattr(mx, dtype)) for _ in range(2))
        mx.eval(a, b)
        return lambda: mx.eval(a @ b)

    def attention_works(self, shape: Any) -> dict[str, Callable[[], object]]:
        """See `dualtune.doctor.bench.attention.TimesAttention`."""
        sizes = shape.tokens, shape.heads, shape.kv_heads, shape.head_size
        return {**attention_works(*sizes, getattr(mx, shape.dtype))}

    def peak_of(self, work: Callable[[], object]) -> int:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        work()
        return mx.get_peak_memory() - before

    def profile(self, work: Callable[[], object], directory: Path) -> Profile:
        return profile(work, directory / "mlx.gputrace")
