"""The torch backend: which devices and values it honours, and how it builds an engine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.world import World
from dualtune.engine.backend import DeviceInfo, LoadRequest, MemoryStats, Profile, loading
from dualtune_torch import layer, numerics
from dualtune_torch.card import CARD
from dualtune_torch.distributed import joined, launched, local_rank, world
from dualtune_torch.engine import TorchEngine
from dualtune_torch.host.transfers import counted_waits
from dualtune_torch.kernels import allocator
from dualtune_torch.kernels.attention import attention_works
from dualtune_torch.kernels.lora_backward import lora_backward, time_lora_backward
from dualtune_torch.kernels.products import write_product
from dualtune_torch.model import DTYPES, load_base, with_own_modules
from dualtune_torch.profile import peak_of, profile
from dualtune_torch.sharding import Shards
from dualtune_torch.weights import nf4

DEVICES = ("auto", "cpu", "cuda", "cuda:N")
# In the messages of a GPU's errors that have no class of their own: from cuBLAS, cuDNN and Triton's launcher.
DEVICE_FAULTS = ("CUDA error: ", "CUDA driver error: ", "cuDNN error: ", "Triton Error [CUDA]: ")


class TorchBackend:
    """See `dualtune.engine.backend.Backend`."""

    name = CARD.name
    # For `dualtune.engine.kernels`.
    lora_backward = staticmethod(lora_backward)
    linear_shapes = staticmethod(layer.linear_shapes)
    add_lora_layers = staticmethod(layer.add_layers)
    lora_layers = staticmethod(layer.lora_layers)

    def __init__(self, device: str = "auto") -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ConfigError(f"device: got '{device}', the backend 'torch' has: {', '.join(DEVICES)}")
        # Count GPUs as NVML and so check-gpu do. CUDA reads it when it starts; its own order is by speed.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        if device.startswith("cuda") and not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
            raise EnvironmentFault(
                f"platform cuda: torch {torch.__version__} ({built}) sees no NVIDIA GPU. "
                "Run: dualtune check-gpu, or train with --platform cpu"
            )
        if device in ("auto", "cuda") and launched() and torch.cuda.is_available():
            device = f"cuda:{local_rank()}"
        self.device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        if ":" in device:
            self.device = _numbered(device)
        if self.device.type == "cuda":
            allocator.grow_segments()

    def capabilities(self) -> Mapping[str, frozenset[Any]]:
        return CARD.capabilities(self.device.type)

    def devices(self) -> list[DeviceInfo]:
        if self.device.type == "cuda":
            current = torch.cuda.current_device()  # `_numbered` selected it
            order = sorted(range(torch.cuda.device_count()), key=lambda index: index != current)
            gpus = ((torch.cuda.get_device_properties(index), index) for index in order)
            return [DeviceInfo(gpu.name, "cuda", gpu.total_memory, index) for gpu, index in gpus]
        return [DeviceInfo(platform.processor() or platform.machine(), "cpu", _machine_bytes())]

    def memory(self) -> MemoryStats:
        if self.device.type == "cuda":
            return _cuda_memory(self.device)
        used, peak = _process_memory()
        return MemoryStats(used, max(used, peak), _machine_bytes())

    def reset_peak_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif (marker := Path("/proc/self/clear_refs")).exists():
            marker.write_text("5")  # Linux: set the high-water mark to what is used now

    def is_out_of_memory(self, error: BaseException) -> bool:
        return allocator.is_out_of_memory(error)

    def is_device_fault(self, error: BaseException) -> bool:
        is_known = isinstance(error, RuntimeError) and any(text in str(error) for text in DEVICE_FAULTS)
        return is_known and not self.is_out_of_memory(error)

    def load(self, request: LoadRequest) -> TorchEngine:
        allocator.limit_memory(request.memory_limit_bytes, self.device)
        shards = Shards(self.device) if joined() and request.sharding != "none" else None
        settings = [numerics.exact, *([numerics.deterministic] if request.deterministic else [])]
        together = numerics.together(*settings, *([shards.together] if shards else []))
        with together():
            with loading(self, request.model_dir, "torch"):
                model, description = request.shared(lambda: load_base(request, self.device))
            if request.shared_base is not None:
                model = with_own_modules(model)
            if request.deterministic and self.device.type == "cuda":
                numerics.use_fixed_experts(model)
            if shards is None or description["sharding"] == "none":
                return TorchEngine(model, request, description, numerics.together(*settings))
            shards.split(model, self.device)
            return TorchEngine(model, request, description, together)

    def world(self) -> World:
        return world(self.device.type)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def counted_waits(self) -> AbstractContextManager[list[str]] | str:
        """See `dualtune.doctor.selftest.cost`."""
        return counted_waits() if self.device.type == "cuda" else "a CPU computes at once: there is nothing to wait for"

    def matmul(self, size: int, dtype: str) -> Callable[[], object]:
        a, b, c = (torch.randn(size, size, device=self.device).to(DTYPES[dtype]) for _ in range(3))

        def product() -> None:
            write_product(c, a, b)
            self.synchronize()

        return product

    def time_lora_backward(self, shape: Any, *, rounds: int) -> dict[str, list[float]]:
        """See `dualtune.doctor.bench.lora_backward.time_lora_backward`."""
        sizes = shape.batch, shape.tokens, shape.features, shape.rank
        return time_lora_backward(self.device, *sizes, rounds)

    def attention_works(self, shape: Any) -> dict[str, Callable[[], object]]:
        """See `dualtune.doctor.bench.attention.TimesAttention`."""
        sizes = shape.tokens, shape.heads, shape.kv_heads, shape.head_size
        return {**attention_works(self.device, *sizes, DTYPES[shape.dtype])}

    def peak_of(self, work: Callable[[], object]) -> int:
        """Count what torch's allocator hands out during the work: a CPU's memory of a process says less."""
        return peak_of(work, self.device)

    def write_nf4(self, source: Path, out: Path) -> None:
        """See `dualtune.use.export.request.WritesNf4`."""
        nf4.write_model(source, out, self.device)

    def profile(self, work: Callable[[], object], directory: Path) -> Profile:
        return profile(work, directory / "torch-trace.json", self.device)


def _numbered(name: str) -> torch.device:
    """Select a GPU by its number. Kernels, memory statistics and new tensors use torch's current GPU."""
    device, count = torch.device(name), torch.cuda.device_count()
    if device.index >= count:
        raise EnvironmentFault(f"platform {name}: torch sees {count} NVIDIA GPU{'s' * (count != 1)}, numbered from 0")
    torch.cuda.set_device(device)
    return device


def _cuda_memory(device: torch.device) -> MemoryStats:
    """Return the view of the caching allocator, with one reading of its counters."""
    total = torch.cuda.get_device_properties(device).total_memory
    counters = torch.cuda.memory_stats_as_nested_dict(device)
    if not counters:  # CUDA is not initialized
        return MemoryStats(0, 0, total, 0)
    allocated, reserved = counters["allocated_bytes"]["all"], counters["reserved_bytes"]["all"]
    cached = reserved["current"] - allocated["current"]
    return MemoryStats(allocated["current"], allocated["peak"], total, cached)


@cache
def _machine_bytes() -> int:
    return psutil.virtual_memory().total


def _process_memory() -> tuple[int, int]:
    """Return the resident set size of this process now and at its peak, in bytes."""
    if (status_file := _status(os.getpid())) is None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
        return psutil.Process().memory_info().rss, peak
    status = os.pread(status_file, 4096, 0)
    peak, used = (int(status[at : at + 32].split(None, 2)[1]) for at in map(status.index, (b"VmHWM:", b"VmRSS:")))
    return used * 1024, peak * 1024


@cache
def _status(process: int) -> int | None:
    """Open the numbers of a process once: opening takes longer than reading. None on macOS."""
    path = Path(f"/proc/{process}/status")
    return os.open(path, os.O_RDONLY) if path.exists() else None
