"""NVIDIA GPUs by NVML, the library of the driver: which ones exist, and which of them CUDA will see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import Any, TypeVar

import psutil

from dualtune.engine.machine import Fault, Gpu, GpuProcess

T = TypeVar("T")
# NVML's return codes: docs.nvidia.com/deploy/nvml-api, nvmlReturn_t
FAULTS: dict[int, Fault] = {4: "no permission", 9: "not loaded", 12: "no library", 18: "mismatch"}
NOT_SUPPORTED = 3


@dataclass(frozen=True, slots=True)
class Nvidia:
    """What the driver reports, or why it reports nothing."""

    visible: tuple[Gpu, ...] = ()
    hidden: tuple[Gpu, ...] = ()
    mig_without_slice: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()  # GPUs that the driver lists but cannot read, each with its words
    driver: str | None = None
    cuda: str | None = None
    fault: Fault | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Card:
    """A GPU as CUDA counts it: as a whole, or in MIG mode by its slices."""

    name: str
    uuid: str
    is_mig: bool
    parts: tuple[Gpu, ...]  # the GPU itself, or its slices; none if it cannot be read
    problem: str | None = None  # why it cannot be read


def query(visible_devices: str | None) -> Nvidia:
    """Query the driver. `visible_devices` is CUDA_VISIBLE_DEVICES, None if not set."""
    try:
        nvml: Any = import_module("pynvml")  # of the distribution nvidia-ml-py
    except ImportError as error:
        return Nvidia(fault="no binding", problem=str(error))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _fault(error)
    try:
        return _read(nvml, visible_devices)
    except nvml.NVMLError as error:
        return _fault(error)
    finally:
        nvml.nvmlShutdown()


def _fault(error: Any) -> Nvidia:
    return Nvidia(fault=FAULTS.get(getattr(error, "value", 0), "other"), problem=str(error))


def _read(nvml: Any, visible_devices: str | None) -> Nvidia:
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    cards: list[_Card] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            cards.append(_card(nvml, index))
        except nvml.NVMLError as error:  # a lost GPU must not hide the others
            cards.append(_Card(f"GPU {index}", "", is_mig=False, parts=(), problem=str(error)))
    visible = tuple(choose_visible(cards, visible_devices))
    shown = {gpu.uuid for gpu in visible}
    return Nvidia(
        visible=visible,
        hidden=tuple(gpu for card in cards for gpu in card.parts if gpu.uuid not in shown),
        mig_without_slice=tuple(card.name for card in cards if card.is_mig and not card.parts),
        unreadable=tuple(f"{card.name} ({card.problem})" for card in cards if card.problem),
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
    )


# --- which of them CUDA shows ----------------------------------------------------------------------------------------


def choose_visible(cards: Iterable[_Card], visible_devices: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order and by CUDA's rules.

    CUDA stops at the first entry that is not a GPU and shows nothing if one comes twice; a GPU- or MIG- UUID may be
    abbreviated. Of a GPU in MIG mode it uses the first slice, unless a slice is named. The rules for numbers and
    repetitions are those of torch.cuda's `_parse_visible_devices`. Numbers are in the order of the PCI bus, which
    is also CUDA's order if CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
    """
    cards = list(cards)
    if visible_devices is None:
        return [card.parts[0] for card in cards if card.parts]
    entries = [entry.strip() for entry in visible_devices.split(",")]
    chosen = list(takewhile(lambda gpu: gpu is not None, (_entry(cards, entry) for entry in entries)))
    gpus = [gpu for gpu in chosen if gpu is not None]
    return gpus if len({gpu.uuid for gpu in gpus}) == len(gpus) else []


def _entry(cards: list[_Card], entry: str) -> Gpu | None:
    if entry.isdigit():
        return next(iter(cards[int(entry)].parts), None) if int(entry) < len(cards) else None
    if entry.startswith("GPU-"):
        matches = [card.parts[0] for card in cards if card.uuid.startswith(entry) and card.parts]
    elif entry.startswith("MIG-"):
        matches = [gpu for card in cards if card.is_mig for gpu in card.parts if gpu.uuid.startswith(entry)]
    else:
        return None
    return matches[0] if len(matches) == 1 else None


# --- one GPU ---------------------------------------------------------------------------------------------------------


def _card(nvml: Any, index: int) -> _Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = _text(nvml.nvmlDeviceGetName(handle))
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    uuid = _text(optional(nvml, lambda: nvml.nvmlDeviceGetUUID(handle), f"GPU-{index}"))
    mode = optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)  # not supported by most GPUs
    if not mode:
        gpu = _gpu(nvml, handle, name, f"{major}.{minor}", uuid)
        return _Card(name, uuid, is_mig=False, parts=(gpu,))
    slices: list[Gpu] = []
    for number in range(optional(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)), 0)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # numbers may have gaps, and access to some may be denied
            continue
        own_name, own_uuid = _text(nvml.nvmlDeviceGetName(part)), _text(nvml.nvmlDeviceGetUUID(part))
        slices.append(_gpu(nvml, part, own_name, f"{major}.{minor}", own_uuid))
    return _Card(name, uuid, is_mig=True, parts=tuple(slices))


def _gpu(nvml: Any, handle: Any, name: str, compute_capability: str, uuid: str) -> Gpu:
    total_bytes, free_bytes = _memory(nvml, handle)
    return Gpu(
        name=name,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        compute_capability=compute_capability,
        uuid=uuid,
        mig=name.rpartition(" MIG ")[2] if " MIG " in name else None,
        processes=tuple(_processes(nvml, handle)),
    )


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return total and free bytes: those of the host if the GPU has no memory of its own, such as a GB10."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if getattr(error, "value", 0) != NOT_SUPPORTED:
            raise
        host = psutil.virtual_memory()
        return host.total, host.available
    return memory.total, memory.free


def _processes(nvml: Any, handle: Any) -> Iterator[GpuProcess]:
    running: list[Any] = optional(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    for process in running:
        try:
            name = psutil.Process(process.pid).name()
        except psutil.Error:
            name = "?"  # in another container, or ended
        yield GpuProcess(process.pid, name, process.usedGpuMemory)


def optional(nvml: Any, question: Callable[[], T], otherwise: T) -> T:
    """Return the answer, or a default if this driver or GPU gives none, or not to this user."""
    try:
        return question()
    except nvml.NVMLError:
        return otherwise


def _text(value: object) -> str:
    """Return a string of NVML; old bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
