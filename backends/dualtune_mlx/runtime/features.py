"""Whether the installed MLX has everything that this backend uses."""

from __future__ import annotations

import sys
from functools import reduce
from types import ModuleType

import mlx.core as mx

from dualtune.errors import EnvironmentFault

# That of pyproject.toml, and of mlx-lm 0.32. Of the names below, 0.30.0 to 0.30.3 lack `device_info`, which was in
# `mlx.core.metal`.
LEAST_MLX = "0.32.2"
FOR_MLX_LM = ("new_thread_local_stream",)  # in mlx_lm/generate.py, without which mlx-lm 0.32 does not import
# Every function and class of `mlx.core` that this package names; tests/nogpu/metal/test_metal_features.py compares.
NEEDED = (
    "DeviceType", "Dtype", "Stream", "abs", "addmm", "allclose", "arange", "argmax", "argpartition", "array",
    "array_equal", "async_eval", "bfloat16", "bool_", "broadcast_to", "clear_cache", "clip", "compile",
    "concatenate", "contiguous", "cpu", "cumsum", "custom_function", "default_device", "depends", "dequantize",
    "device_info", "distributed.all_gather", "distributed.all_sum", "distributed.init", "eval", "exp", "expm1",
    "eye", "fast.rms_norm", "fast.scaled_dot_product_attention", "float16", "float32", "floating", "full",
    "get_active_memory", "get_cache_memory", "get_peak_memory", "grad", "inf", "int16", "int32", "int64", "int8",
    "isfinite", "issubdtype", "load", "log", "logaddexp", "logsumexp", "maximum", "metal.is_available",
    "metal.start_capture", "metal.stop_capture", "minimum", "nan", "new_stream", "pad", "power", "put_along_axis",
    "quantized_matmul", "random.normal", "random.seed", "repeat", "reset_peak_memory", "round", "set_cache_limit",
    "set_default_device", "set_memory_limit", "set_wired_limit", "sigmoid", "slice_update", "softmax", "split",
    "sqrt", "square", "stack", "stop_gradient", "stream", "synchronize", "take_along_axis", "tri", "uint16",
    "uint32", "uint8", "value_and_grad", "vjp", "where", "zeros", "zeros_like",
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
