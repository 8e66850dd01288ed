"""What of MLX is checked and set before it computes: its version, device, memory, order of sums and precision."""

from __future__ import annotations

import sys
from functools import cache, reduce
from types import ModuleType

import mlx.core as mx
from mlx import nn

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune_mlx.card.checks import TF32, tf32_setting
from dualtune_mlx.card.memory import METAL_RESERVE

# ----------------------------------------------------------------------------------------------------------------------
# Whether the installed MLX has everything that this backend uses.

# That of pyproject.toml, and of mlx-lm 0.32. Of the names below, 0.30.0 to 0.30.3 lack `device_info`, which was in
# `mlx.core.metal`.
LEAST_MLX = "0.32.2"
FOR_MLX_LM = ("new_thread_local_stream",)  # in mlx_lm/generate.py, without which mlx-lm 0.32 does not import
# Every function and class of `mlx.core` that this package names; tests/nogpu/metal/test_metal_features.py compares.
NEEDED = (
    "DeviceType", "Dtype", "Stream", "abs", "addmm", "allclose", "arange", "argmax", "argpartition", "argsort",
    "array", "array_equal", "async_eval", "bfloat16", "bool_", "broadcast_to", "clear_cache", "clip", "compile",
    "concatenate", "contiguous", "cpu", "cumsum", "custom_function", "default_device", "depends", "dequantize",
    "device_info", "distributed.all_gather", "distributed.all_sum", "distributed.init", "eval", "exp", "expm1", "eye",
    "fast.rms_norm", "fast.scaled_dot_product_attention", "float16", "float32", "floating", "full", "gather_mm",
    "get_active_memory", "get_cache_memory", "get_peak_memory", "grad", "inf", "int16", "int32", "int64", "int8",
    "isfinite", "issubdtype", "linalg.norm", "load", "log", "logaddexp", "logsumexp", "max", "maximum",
    "metal.is_available", "metal.start_capture", "metal.stop_capture", "minimum", "nan", "new_stream", "ones", "pad",
    "power", "put_along_axis", "quantized_matmul", "random.key", "random.normal", "random.seed", "repeat",
    "reset_peak_memory", "round", "set_cache_limit", "set_default_device", "set_memory_limit", "set_wired_limit",
    "sigmoid", "slice_update", "softmax", "split", "sqrt", "square", "stack", "stop_gradient", "stream",
    "synchronize", "take_along_axis", "tri", "uint16", "uint32", "uint8", "value_and_grad", "vjp", "where", "zeros",
    "zeros_like",
)  # fmt: skip


def check_features(core: ModuleType = mx) -> None:
    """Raise EnvironmentFault if the installed MLX lacks something: it names what, and the version to install."""
    missing = [name for name in (*NEEDED, *FOR_MLX_LM) if not _has(core, name)]
    if missing:
        raise EnvironmentFault(
            f"MLX {core.__version__} lacks {', '.join(f'mlx.core.{name}' for name in missing)}, which dualtune needs. "
            f"Install a newer one: pip install -U '{'mlx' if sys.platform == 'darwin' else 'mlx[cpu]'}>={LEAST_MLX}'"
        )


def _has(core: ModuleType, name: str) -> bool:
    absent = object()
    return reduce(lambda owner, part: getattr(owner, part, absent), name.split("."), core) is not absent


# ----------------------------------------------------------------------------------------------------------------------
# The device that MLX computes on.


def chip() -> str | None:
    """Return the name of the GPU that computes, such as "Apple M4 Max"; None if a CPU does."""
    if not mx.metal.is_available() or mx.default_device().type != mx.DeviceType.gpu:
        return None
    return str(mx.device_info()["device_name"])


# ----------------------------------------------------------------------------------------------------------------------
# How much memory MLX may hold, in arrays and in the buffers that it keeps after arrays are freed.


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


# ----------------------------------------------------------------------------------------------------------------------
# Whether Metal adds numbers up in the same order each time.

# Layers whose backward pass adds by atomics, in any order, to one place from several threads: rows that go to several
# experts (a scatter), and the state of a gated delta rule. Of MLX 0.32's kernels, no other one in a step does
# (mlx/backend/metal/kernels: atomic_update in indexing/scatter.h and gated_delta_update_vjp.h).
IN_ANY_ORDER = ("SwitchLinear", "GatedDeltaNet", "DeltaAttention")  # how the names of their classes end


def check_order(model: nn.Module) -> None:
    """Raise ConfigError for a model whose gradient on Metal is not the same bits each time."""
    names = sorted({name for name in map(_name, model.modules()) if name.endswith(IN_ANY_ORDER)})
    if names and chip() is not None:
        raise ConfigError(
            f"run.deterministic: got true, but this model has layers whose gradient Metal adds up in any order "
            f"({', '.join(names)}); allowed: false. Or train it with --platform cpu"
        )


def _name(module: nn.Module) -> str:
    return type(module).__name__


# ----------------------------------------------------------------------------------------------------------------------
# How exact products of float32 are.

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
