"""The torch backend: which devices and values it honours, and how it builds an engine."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from dualtune.backend import DeviceInfo, LoadRequest, MemoryStats, Profile, World
from dualtune.errors import ConfigError, EnvironmentFault
from dualtune_torch.card import CARD
from dualtune_torch.distributed import joined, launched, local_rank, world
from dualtune_torch.engine import TorchEngine
from dualtune_torch.kernels import allocator
from dualtune_torch.model import DTYPES, load_base
from dualtune_torch.profile import profile
from dualtune_torch.sharding import Shards

DEVICES = ("auto", "cpu", "cuda", "cuda:N")


class TorchBackend:
    name = CARD.name

    def __init__(self, device: str = "auto") -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ConfigError(f"device: got '{device}', the backend 'torch' has: {', '.join(DEVICES)}")
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

    def capabilities(self) -> Mapping[str, frozenset[Any]]:
        return CARD.capabilities(self.device.type)

    def devices(self) -> list[DeviceInfo]:
        if self.device.type == "cuda":
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            return [DeviceInfo(gpu.name, "cuda", gpu.total_memory) for gpu in found]
        return [DeviceInfo(platform.processor() or platform.machine(), "cpu", psutil.virtual_memory().total)]

    def memory(self) -> MemoryStats:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            return MemoryStats(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), total)
        used = psutil.Process().memory_info().rss
        return MemoryStats(used, max(used, _peak_rss()), psutil.virtual_memory().total)

    def reset_peak_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif (marker := Path("/proc/self/clear_refs")).exists():
            marker.write_text("5")  # Linux: set the high-water mark to what is used now

    def is_out_of_memory(self, error: BaseException) -> bool:
        return allocator.is_out_of_memory(error)

    def load(self, request: LoadRequest) -> TorchEngine:
        shards = Shards(self.device) if joined() and request.sharding != "none" else None
        with shards.together() if shards else nullcontext():
            model, description = load_base(request, self.device)
            if shards is None or description["sharding"] == "none":
                return TorchEngine(model, request, description)
            shards.split(model, self.device)
            return TorchEngine(model, request, description, shards.together)

    def world(self) -> World:
        return world(self.device.type)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def matmul(self, size: int, dtype: str) -> Callable[[], object]:
        a, b, c = (torch.randn(size, size, device=self.device).to(DTYPES[dtype]) for _ in range(3))

        def product() -> None:
            torch.mm(a, b, out=c)
            self.synchronize()

        return product

    def profile(self, work: Callable[[], object], directory: Path) -> Profile:
        return profile(work, directory / "torch-trace.json", self.device)


def _numbered(name: str) -> torch.device:
    """Select a GPU by its number. Kernels, memory statistics and new tensors use torch's current GPU."""
    device, count = torch.device(name), torch.cuda.device_count()
    if device.index >= count:
        raise EnvironmentFault(f"platform {name}: torch sees {count} NVIDIA GPU{'s' * (count != 1)}, numbered from 0")
    torch.cuda.set_device(device)
    return device


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
