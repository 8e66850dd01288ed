"""The memory in use: of a process, of a GPU, and of a run as snapshots with two CSV forms, in MB and in bytes."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from dualtune.base.errors import FormatError
from dualtune.base.untrusted import open_file
from dualtune.engine.backend import MemoryStats
from dualtune.engine.nvidia import query

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
# The memory of a whole NVIDIA GPU as its driver counts it: that of every process, contexts and caches included.


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


# ----------------------------------------------------------------------------------------------------------------------
# A snapshot of a run, in MB for people and in bytes for the run directory.

MB, GB = 1 << 20, 1 << 30
MAX_TIMELINE_BYTES = GB  # of the file; a step has about a thousand
MAX_ROW = 4096  # bytes of a row that is read; a longer one is damaged
CSV_HEADER = ("step", "phase", "used_mb", "total_mb", "utilization_percent")
TIMELINE_HEADER = (
    "step", "phase", "used_bytes", "peak_bytes", "cached_bytes", "process_bytes", "device_bytes", "total_bytes", "time",
)  # fmt: skip


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

    @property
    def used_mb(self) -> float:
        return self.used_bytes / MB

    @property
    def used_gb(self) -> float:
        return self.used_bytes / GB

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


def timeline_row(snapshot: Snapshot) -> str:
    """Return a row of the run's timeline. A number that is not known is empty."""
    s = snapshot
    numbers = (s.used_bytes, s.peak_bytes, s.cached_bytes, s.process_bytes, s.device_bytes, s.total_bytes)
    cells = ",".join("" if number is None else str(number) for number in numbers)
    return f"{s.step},{s.phase},{cells},{s.timestamp:.3f}\n"


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
            f"{error}. Give the directory of a run; runs of older versions and runs "
            "that have not begun a step have no timeline"
        ) from error
    with file:
        lines = (line.decode("utf-8", errors="replace") for line in iter(lambda: file.readline(MAX_ROW), b""))
        if next(lines, "").strip().split(",") != [*TIMELINE_HEADER]:
            raise FormatError(f"{path}: not a timeline of memory; its first line must be {','.join(TIMELINE_HEADER)}")
        yield from parsed_timeline(line for line in lines if line.endswith("\n"))


def parsed_timeline(lines: Iterable[str]) -> Iterator[Snapshot]:
    """Yield the snapshots of rows of a timeline; the header and damaged rows are left out."""
    for line in lines:
        cells = line.rstrip("\n").split(",")
        if len(cells) != len(TIMELINE_HEADER):
            continue
        step, phase, *numbers, time = cells
        try:
            used, peak, cached, process, device, total = (int(cell) if cell else None for cell in numbers)
            if used is not None and total is not None:
                yield Snapshot(int(step), phase, used, total, float(time), peak, cached, process, device)
        except ValueError:  # damaged
            continue
