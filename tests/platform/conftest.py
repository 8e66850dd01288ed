"""A made-up NVIDIA driver: the module `pynvml` with cards, MIG slices, processes and failures to order."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualtune.config.render import example_path
from dualtune.doctor.check_config import ConfigReport, check_config

DEMO = Path(__file__).parents[2] / "dualtune" / "demo"
MIB = 2**20
LIBRARY_NOT_FOUND, NOT_LOADED, MISMATCH, NO_PERMISSION, NOT_SUPPORTED, NOT_FOUND, IS_LOST = 12, 9, 18, 4, 3, 6, 15


class NVMLError(Exception):
    """As in pynvml: a number, and words for it."""

    def __init__(self, value, text="made up"):
        super().__init__(text)
        self.value = value


@dataclass
class Card:
    """A card, or a slice of one."""

    name: str
    mib: int
    free_mib: int
    capability: tuple = (9, 0)
    uuid: str = ""
    slices: list | None = None  # None: not in MIG mode; an entry None is a gap
    processes: list = field(default_factory=list)  # (pid, MiB or None)
    error: tuple | None = None  # (number, text) with which it answers everything
    memory_error: tuple | None = None  # likewise, only about its memory


class FakeNvml:
    """The module `pynvml`. `init_error` and `count_error` are (number, text)."""

    NVMLError = NVMLError

    def __init__(self, *cards, init_error=None, count_error=None, cuda=12090):
        self._cards, self._init_error, self._count_error, self._cuda = cards, init_error, count_error, cuda
        for i, card in enumerate(cards):
            card.uuid = card.uuid or f"GPU-{i}{i}{i}{i}"
        self.open = 0

    def nvmlInit(self):
        if self._init_error:
            raise NVMLError(*self._init_error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self._cuda

    def nvmlDeviceGetCount(self):
        if self._count_error:
            raise NVMLError(*self._count_error)
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._cards[index]

    def nvmlDeviceGetName(self, card):
        if card.error:
            raise NVMLError(*card.error)
        return card.name

    def nvmlDeviceGetUUID(self, card):
        return card.uuid

    def nvmlDeviceGetMemoryInfo(self, card):
        if card.memory_error:
            raise NVMLError(*card.memory_error)
        return SimpleNamespace(total=card.mib * MIB, free=card.free_mib * MIB)

    def nvmlDeviceGetCudaComputeCapability(self, card):
        return card.capability

    def nvmlDeviceGetMigMode(self, card):
        if card.capability < (8, 0):
            raise NVMLError(NOT_SUPPORTED)
        return [int(card.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, index):
        if index >= len(card.slices) or card.slices[index] is None:
            raise NVMLError(NOT_FOUND)
        return card.slices[index]

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        if card.capability < (7, 0):
            raise NVMLError(NOT_SUPPORTED)
        return [SimpleNamespace(pid=pid, usedGpuMemory=mib and mib * MIB) for pid, mib in card.processes]


@pytest.fixture
def nvml(monkeypatch):
    """Install a made-up driver: `nvml(card, …, init_error=…)`."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*cards, **settings) -> FakeNvml:
        fake = FakeNvml(*cards, **settings)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


@pytest.fixture(scope="session")
def card():
    """A card of the made-up driver."""
    return Card


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check_config of an example for a machine, with the demo's data and a run directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(
        *overrides: str, name: str = "training_config_h100", machine: str | None = "h100-80", **options
    ) -> ConfigReport:
        here = [f"data.train={DEMO / 'data' / 'train.jsonl'}", f"run.dir={tmp_path / 'run'}", *overrides]
        return check_config(example_path(name), here, machine_name=machine, **options)

    return run
