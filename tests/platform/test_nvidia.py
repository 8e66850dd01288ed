"""What the NVIDIA driver says, with a module `pynvml` that is made up."""

import os

import psutil
import pytest

from dualtune.engine.detect import detect
from dualtune.engine.machine import Gpu, GpuProcess

MIB = 2**20


@pytest.fixture
def h100(card):
    return card("NVIDIA H100 80GB HBM3", 81559, 81000, (9, 0), uuid="GPU-aaaa")


@pytest.fixture
def l4(card):
    return card("NVIDIA L4", 23034, 22000, (8, 9), uuid="GPU-bbbb")


@pytest.fixture
def sliced(card):
    """An H100 in MIG mode: a gap, a small slice, a large one."""
    parts = [None, *(card(f"NVIDIA H100 80GB HBM3 MIG {profile}", mib, mib, uuid=f"MIG-{profile}")
                     for profile, mib in (("1g.10gb", 9856), ("3g.40gb", 40320)))]  # fmt: skip
    return card("NVIDIA H100 80GB HBM3", 81559, 81000, uuid="GPU-cccc", slices=parts)


def test_gpus_are_listed_with_memory_and_capability(nvml, h100, l4):
    fake = nvml(h100, l4)
    machine = detect()
    assert machine.gpus == [
        Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB, 81000 * MIB, "9.0", "GPU-aaaa"),
        Gpu("NVIDIA L4", 23034 * MIB, 22000 * MIB, "8.9", "GPU-bbbb"),
    ]
    assert (machine.driver, machine.cuda, machine.gpu_problem) == ("580.65.06", "12.9", None)
    assert fake.open == 0


@pytest.mark.parametrize(
    ("errors", "fault"),
    [
        ({"init_error": (12, "NVML Shared Library Not Found")}, "no library"),
        ({"init_error": (9, "Driver Not Loaded")}, "not loaded"),
        ({"init_error": (18, "Driver/library version mismatch")}, "mismatch"),
        ({"init_error": (4, "Insufficient Permissions")}, "no permission"),
        ({"init_error": (999, "Unknown Error")}, "other"),
        ({"count_error": (15, "GPU is lost")}, "other"),
    ],
)
def test_without_a_working_driver_its_words_are_the_reason(nvml, h100, errors, fault):
    fake = nvml(h100, **errors)
    machine = detect()
    assert (machine.gpus, machine.driver, machine.cuda) == ([], None, None)
    assert (machine.gpu_problem, machine.gpu_fault) == (next(iter(errors.values()))[1], fault)
    assert fake.open == 0


def test_a_missing_binding_is_no_crash(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert detect().gpu_fault == "no binding"


def test_the_text_of_old_bindings_is_decoded(nvml, h100):
    fake = nvml(h100)
    fake.nvmlSystemGetDriverVersion = lambda: b"470.1"
    assert detect().driver == "470.1"


def test_programs_that_hold_memory_are_named(nvml, h100):
    h100.processes = [(os.getpid(), 700), (2**22 + 1, None)]
    nvml(h100)
    mine, gone = detect().gpus[0].processes
    assert (mine.pid, mine.used_bytes) == (os.getpid(), 700 * MIB) and mine.name not in ("", "?")
    assert gone == GpuProcess(2**22 + 1, "?", None)


def test_a_driver_that_does_not_list_programs_is_no_error(nvml, card):
    nvml(card("Tesla P100", 16384, 16000, (6, 0)))
    assert detect().gpus[0].processes == ()


# --- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, "ABC"), ("0,1,2", "ABC"), ("1", "B"), ("2,0", "CA"), ("", ""), ("-1", ""), (" 1 , 2 ", "BC"),
        ("0,-1,2", "A"), ("7", ""), ("1,7,2", "B"), ("nonsense", ""), ("NoDevFiles", ""), ("1,1", ""),
        ("GPU-b000", "B"), ("GPU-b", "B"), ("GPU-c,GPU-a", "CA"), ("GPU-zz", ""), ("GPU-", ""), ("GPU-b,x,GPU-a", "B"),
        ("MIG-b000", ""),
    ],
)  # fmt: skip
def test_only_visible_gpus_are_listed(nvml, card, monkeypatch, wanted, names):
    """As CUDA does it: in the order given, up to the first entry that is no GPU, nothing where one comes twice."""
    nvml(*(card(name, 1000, 1000, uuid=f"GPU-{name.lower()}000") for name in "ABC"))
    if wanted is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    machine = detect()
    assert [gpu.name for gpu in machine.gpus] == list(names)
    assert sorted(gpu.name for gpu in machine.hidden_gpus) == sorted(set("ABC") - set(names))
    assert machine.visible_devices == wanted


@pytest.mark.parametrize(
    ("wanted", "visible"),
    [
        (None, ["1g.10gb", None]),  # CUDA takes one slice
        ("0", ["1g.10gb"]), ("1", [None]), ("MIG-3g.40gb", ["3g.40gb"]), ("MIG-3", ["3g.40gb"]), ("MIG-9", []),
        ("GPU-cccc", ["1g.10gb"]), ("MIG-1g.10gb,MIG-3g.40gb", ["1g.10gb", "3g.40gb"]),
    ],
)  # fmt: skip
def test_slices_of_a_gpu_are_gpus(nvml, sliced, l4, monkeypatch, wanted, visible):
    nvml(sliced, l4)
    if wanted is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    machine = detect()
    assert [gpu.mig for gpu in machine.gpus] == visible
    assert len(machine.gpus) + len(machine.hidden_gpus) == 3
    assert machine.mig_without_slice == ()


def test_a_slice_has_its_own_memory_and_its_gpu_s_capability(nvml, sliced):
    nvml(sliced)
    assert detect().gpus == [
        Gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9856 * MIB, 9856 * MIB, "9.0", "MIG-1g.10gb", mig="1g.10gb")
    ]


def test_a_gpu_in_mig_mode_without_slices_cannot_be_used(nvml, card, l4):
    nvml(card("NVIDIA A100-SXM4-40GB", 40960, 40000, (8, 0), slices=[]), l4)
    machine = detect()
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA L4"]
    assert machine.mig_without_slice == ("NVIDIA A100-SXM4-40GB",)


def test_a_lost_gpu_does_not_hide_the_others(nvml, h100, l4):
    h100.error = (15, "GPU is lost")
    nvml(h100, l4)
    machine = detect()
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA L4"] and machine.kind == "cuda"
    assert machine.unreadable_gpus == ("GPU 0 (GPU is lost)",) and machine.gpu_problem is None
    assert machine.mig_without_slice == ()


@pytest.mark.parametrize(("wanted", "names"), [("1", ["NVIDIA L4"]), ("0,1", []), ("1,0", ["NVIDIA L4"])])
def test_a_lost_gpu_keeps_its_number(nvml, h100, l4, monkeypatch, wanted, names):
    h100.error = (15, "GPU is lost")
    nvml(h100, l4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    assert [gpu.name for gpu in detect().gpus] == names


def test_a_gpu_without_memory_of_its_own_has_the_host_s(nvml, card):
    nvml(card("NVIDIA GB10", 0, 0, (12, 1), memory_error=(3, "Not Supported")))
    machine = detect()
    assert machine.gpus[0].total_bytes == psutil.virtual_memory().total
    assert 0 < machine.gpus[0].free_bytes <= machine.gpus[0].total_bytes
    assert machine.unreadable_gpus == ()


def test_a_gpu_that_denies_its_memory_is_not_usable(nvml, card, l4):
    nvml(card("NVIDIA A10", 0, 0, (8, 6), memory_error=(4, "Insufficient Permissions")), l4)
    machine = detect()
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA L4"]
    assert machine.unreadable_gpus == ("GPU 0 (Insufficient Permissions)",)
