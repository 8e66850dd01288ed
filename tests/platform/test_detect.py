"""What this machine is, with a driver that is made up."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dualtune.platform.detect import Gpu, detect

MIB = 2**20


class NVMLError(Exception):
    pass


class FakeNvml:
    """The module `pynvml` with GPUs of given (name, MiB, free MiB, compute capability)."""

    NVMLError = NVMLError

    def __init__(self, *gpus, init_error=None, count_error=None):
        self._gpus, self._init_error, self._count_error = gpus, init_error, count_error
        self.open = 0

    def nvmlInit(self):
        if self._init_error:
            raise NVMLError(self._init_error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12090

    def nvmlDeviceGetCount(self):
        if self._count_error:
            raise NVMLError(self._count_error)
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._gpus[index]

    def nvmlDeviceGetName(self, gpu):
        return gpu[0]

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=gpu[1] * MIB, free=gpu[2] * MIB)

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return gpu[3]


H100 = ("NVIDIA H100 80GB HBM3", 81559, 81000, (9, 0))
L4 = ("NVIDIA L4", 23034, 22000, (8, 9))


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*gpus, **errors) -> FakeNvml:
        fake = FakeNvml(*gpus, **errors)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_gpus_are_listed_with_memory_and_capability(nvml):
    fake = nvml(H100, L4)
    machine = detect()
    assert machine.gpus == [
        Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB, 81000 * MIB, "9.0"),
        Gpu("NVIDIA L4", 23034 * MIB, 22000 * MIB, "8.9"),
    ]
    assert (machine.driver, machine.cuda, machine.gpu_problem) == ("580.65.06", "12.9", None)
    assert fake.open == 0


@pytest.mark.parametrize("errors", [{"init_error": "NVML Shared Library Not Found"}, {"count_error": "GPU is lost"}])
def test_without_a_working_driver_its_words_are_the_reason(nvml, errors):
    fake = nvml(H100, **errors)
    machine = detect()
    assert (machine.gpus, machine.driver, machine.cuda) == ([], None, None)
    assert machine.gpu_problem == next(iter(errors.values()))
    assert fake.open == 0


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["A", "B", "C"]), ("0,1,2", ["A", "B", "C"]), ("1", ["B"]), ("2,0", ["C", "A"]), ("", []), ("-1", []),
        ("0,-1,2", ["A"]), ("7", []), ("1,7,2", ["B"]), ("GPU-5f3d2a", ["A", "B", "C"]),
    ],
)  # fmt: skip
def test_only_visible_gpus_are_listed(nvml, monkeypatch, visible, names):
    """As CUDA does it: in the order given, up to the first index that is not there."""
    nvml(*((name, 1000, 1000, (8, 0)) for name in "ABC"))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in detect().gpus] == names


def test_the_rest_of_the_machine_is_what_the_system_says(nvml):
    nvml()
    machine = detect()
    uname = subprocess.run(["uname", "-sm"], capture_output=True, text=True, check=True).stdout.split()
    assert [machine.system, machine.arch] == uname
    assert machine.python == "{}.{}.{}".format(*sys.version_info[:3])
    assert machine.cpu and machine.cores >= 1
    assert 2**28 < machine.available_bytes <= machine.memory_bytes
    assert machine.packages["transformers"] == __import__("transformers").__version__


def test_detection_imports_no_framework(python):
    code = "import sys; from dualtune.platform.detect import *; detect(); is_installed('torch'); print(*sys.modules)"
    assert not {"torch", "mlx", "transformers"} & set(python("-c", code).stdout.split())
