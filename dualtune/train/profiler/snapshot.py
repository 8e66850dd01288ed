"""The memory in use: of a process, of a GPU, and of a run as snapshots with two CSV forms, in MB and in bytes."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from dualtune.base.errors import FormatError
from dualtune.base.untrusted import open_file
from dualtune.engine.backend import MemoryStats
from dualtune.engine.nvidia import optional, query

# ----------------------------------------------------------------------------------------------------------------------
# The memory of a process, read in microseconds.

_STATM = Path("/proc/self/statm")


def process_reader(pid: int | None = None) -> Callable[[], int]:
    """Return a function that reads the bytes of a process, by default of this one.

    On Linux its anonymous memory, without mapped files, which the system may take back (`resident - shared` of
    /proc/self/statm, proc(5)): 2 µs. Elsewhere the resident set size: 15 µs.
    """
    if not _STATM.exists():
        process = psutil.Process(pid)
        return lambda: process.memory_info().rss
    page, file = os.sysconf("SC_PAGE_SIZE"), _open_statm(pid or os.getpid())

    def anonymous() -> int:
        _, resident, shared, _ = os.pread(file, 256, 0).split(None, 3)
        return (int(resident) - int(shared)) * page

    return anonymous


@cache
def _open_statm(process: int) -> int:
    """Open the numbers of a process once: opening takes longer than reading."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


@cache
def machine_bytes() -> int:
    return psutil.virtual_memory().total


def process_memory() -> MemoryStats:
    """Return the memory of the process as a backend on a CPU does: the source of a profiler without a backend."""
    used = psutil.Process().memory_info().rss
    return MemoryStats(used, used, machine_bytes())


# ----------------------------------------------------------------------------------------------------------------------
# A whole NVIDIA GPU as its driver sees it: the memory of every process, contexts and caches included, use and power.

USE_EVERY_S = 1.0  # the driver averages over up to a second: asking more often tells nothing new


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """What the driver says of a GPU, as nvidia-smi shows it. None: not asked again yet, or this GPU does not say."""

    used_bytes: int
    percent: int | None = None  # of the time in which it computed anything
    power_w: float | None = None


def device_reader(device: str, now: Callable[[], float] = time.monotonic) -> Callable[[], DeviceSample] | None:
    """Return a function that samples an engine's device by NVML.

    `device` is that of `EngineDescription`, such as "cuda:1", where CUDA counts the visible GPUs. None if it is not
    such a device, or if NVML cannot be used; no program is started instead, which would take tens of milliseconds.
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
    read_at = -USE_EVERY_S

    def sample() -> DeviceSample:
        nonlocal read_at
        used_bytes = _used(nvml, handle)
        if now() - read_at < USE_EVERY_S:
            return DeviceSample(used_bytes)
        read_at = now()
        percent = optional(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu), None)
        power_w = optional(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, None)
        return DeviceSample(used_bytes, percent, power_w)

    return sample


def _used(nvml: Any, handle: Any) -> int:
    """Return the used bytes as nvidia-smi shows them: version 2 leaves out what the driver reserves for itself."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    info = nvml.nvmlDeviceGetMemoryInfo(handle, *(() if version is None else (version,)))
    return int(info.used)


# ----------------------------------------------------------------------------------------------------------------------
# A snapshot of a run, in MB for people and in bytes for the run directory.

MB, GB = 1 << 20, 1 << 30
MAX_TIMELINE_BYTES = GB  # of the file; a step has about a thousand
MAX_ROW = 4096  # bytes of a row that is read; a longer one is damaged
CSV_HEADER = ("step", "phase", "used_mb", "total_mb", "utilization_percent")
TIMELINE_HEADER = (
    "step", "phase", "used_bytes", "peak_bytes", "cached_bytes", "process_bytes", "device_bytes", "total_bytes", "time",
    "gpu_percent", "power_w",
)  # fmt: skip
OLD_HEADER = TIMELINE_HEADER[:-2]  # of a file that an older version has begun, and that is continued so


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The memory in use at one moment. On a CPU the used memory is that of the process, elsewhere of the allocator."""

    step: int
    phase: str
    used_bytes: int
    total_bytes: int  # of the device; on a CPU, of the machine
    timestamp: float  # seconds since 1970
    peak_bytes: int | None = None  # the highest use since the run began: it may lie between two snapshots
    cached_bytes: int | None = None  # what the allocator keeps for later, not part of used_bytes
    process_bytes: int | None = None  # of the process on the host
    device_bytes: int | None = None  # of the whole device and all its processes, as the driver counts it
    gpu_percent: int | None = None  # of the last second, in which the device computed
    power_w: float | None = None  # that the device takes

    @property
    def used_mb(self) -> float:
        return self.used_bytes / MB

    @property
    def utilization_percent(self) -> float:
        """The used share of the total; 0 if the total is not known."""
        return 100 * self.used_bytes / self.total_bytes if self.total_bytes else 0.0


def to_csv(snapshots: Iterable[Snapshot]) -> str:
    """Return the table for people and spreadsheets, in MB of 2**20 bytes."""
    rows = (
        (s.step, s.phase, f"{s.used_mb:.2f}", f"{s.total_bytes / MB:.2f}", f"{s.utilization_percent:.2f}")
        for s in snapshots
    )
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([CSV_HEADER, *rows])
    return text.getvalue()


def timeline_row(snapshot: Snapshot, header: Sequence[str] = TIMELINE_HEADER) -> str:
    """Return a row of the run's timeline. A number that is not known is empty."""
    s = snapshot
    numbers = (s.used_bytes, s.peak_bytes, s.cached_bytes, s.process_bytes, s.device_bytes, s.total_bytes)
    texts = ("" if number is None else f"{number:g}" for number in (s.gpu_percent, s.power_w))
    cells = (s.step, s.phase, *("" if number is None else number for number in numbers), f"{s.timestamp:.3f}", *texts)
    return ",".join(map(str, cells[: len(header)])) + "\n"


def read_timeline(path: Path) -> list[Snapshot]:
    """Return the snapshots of a run, as `each_snapshot` yields them."""
    return [*each_snapshot(path)]


def each_snapshot(path: Path) -> Iterator[Snapshot]:
    """Yield the snapshots of a run, without rows that were truncated when it was killed. FormatError if it has none.

    The file is as `timeline_row` writes it, after the header.
    """
    try:
        file = open_file(path, max_bytes=MAX_TIMELINE_BYTES, is_own=True)
    except FormatError as error:
        raise FormatError(
            f"{error}. Give the directory of a run; runs of older versions, of `dualtune serve --train`, and runs "
            "that have not begun a step have no timeline"
        ) from error
    with file:
        lines = (line.decode("utf-8", errors="replace") for line in iter(lambda: file.readline(MAX_ROW), b""))
        if tuple(next(lines, "").strip().split(",")) not in (TIMELINE_HEADER, OLD_HEADER):
            raise FormatError(f"{path}: not a timeline of memory; its first line must be {','.join(TIMELINE_HEADER)}")
        yield from parsed_timeline(line for line in lines if line.endswith("\n"))


def parsed_timeline(lines: Iterable[str]) -> Iterator[Snapshot]:
    """Yield the snapshots of rows of a timeline; the header and damaged rows are left out."""
    for line in lines:
        cells = line.rstrip("\n").split(",")
        if len(cells) not in (len(TIMELINE_HEADER), len(OLD_HEADER)):
            continue
        step, phase, *numbers, seconds = cells[: len(OLD_HEADER)]
        percent, power = cells[len(OLD_HEADER) :] or ("", "")
        try:
            used, peak, cached, process, device, total = (int(cell) if cell else None for cell in numbers)
            if used is not None and total is not None:
                yield Snapshot(
                    int(step), phase, used, total, float(seconds), peak, cached, process, device,
                    int(percent) if percent else None, float(power) if power else None,
                )  # fmt: skip
        except ValueError:  # damaged
            continue
