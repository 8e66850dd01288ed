"""The memory of a whole NVIDIA GPU as its driver counts it: that of every process, contexts and caches included."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from dualtune.platform.nvidia import query


def device_reader(device: str) -> Callable[[], int] | None:
    """Return a function that reads the used bytes of an engine's device by NVML.

    `device` is that of `EngineDescription`, such as "cuda:1", where CUDA counts the visible GPUs. None if it is no such
    device, or if NVML cannot be used; no program is started instead, because that would take tens of milliseconds.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    gpus = query(os.environ.get("CUDA_VISIBLE_DEVICES")).visible
    if int(number or 0) >= len(gpus):
        return None
    nvml: Any = import_module("pynvml")  # it was found by `query`
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(gpus[int(number or 0)].uuid)
        _used(nvml, handle)
    except nvml.NVMLError:
        return None
    return lambda: _used(nvml, handle)


def _used(nvml: Any, handle: Any) -> int:
    """Return the used bytes as nvidia-smi shows them: version 2 leaves out what the driver reserves for itself."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    info = nvml.nvmlDeviceGetMemoryInfo(handle, *(() if version is None else (version,)))
    return int(info.used)
