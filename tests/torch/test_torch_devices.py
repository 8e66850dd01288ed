"""Which device the torch backend takes. The GPUs are made up: torch is told that it has two."""

import os
import sys

import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.engine.backend import get_backend

torch = pytest.importorskip("torch")


@pytest.fixture
def two_gpus(monkeypatch):
    """The GPUs that were made torch's current one."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # what is set in this process would stay
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


@pytest.mark.parametrize(
    ("asked", "device", "taken"),
    [("cuda:1", "cuda:1", ["cuda:1"]), ("cuda:0", "cuda:0", ["cuda:0"]), ("cuda", "cuda", []), ("auto", "cuda", []),
     ("cpu", "cpu", [])],
)  # fmt: skip
def test_a_gpu_is_taken_by_its_number(two_gpus, asked, device, taken):
    assert get_backend("torch", asked).device == torch.device(device)
    assert two_gpus == [torch.device(name) for name in taken]


def test_a_gpu_that_is_not_there_is_refused(two_gpus):
    with pytest.raises(EnvironmentFault, match=r"platform cuda:2: torch sees 2 NVIDIA GPUs, numbered from 0"):
        get_backend("torch", "cuda:2")
    assert two_gpus == []


def test_without_a_gpu_a_number_is_refused_like_the_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(EnvironmentFault, match=r"sees no NVIDIA GPU\. Run: dualtune check-gpu"):
            get_backend("torch", name)


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "metal", "cpu:0"])
def test_an_unknown_device_is_refused(name):
    with pytest.raises(ConfigError, match=f"device: got '{name}', the backend 'torch' has: auto, cpu, cuda, cuda:N"):
        get_backend("torch", name)


@pytest.mark.parametrize(("given", "counted"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_gpus_are_counted_as_the_driver_counts_them(monkeypatch, given, counted):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if given:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", given)
    get_backend("torch", "cpu")
    assert os.environ["CUDA_DEVICE_ORDER"] == counted


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA's segments grow only on Linux")
@pytest.mark.parametrize(
    ("by_user", "capability", "set_"),
    [(None, (9, 0), ["expandable_segments:True"]), (None, (8, 9), []), ("PYTORCH_ALLOC_CONF", (9, 0), []),
     ("PYTORCH_CUDA_ALLOC_CONF", (12, 0), [])],
)  # fmt: skip
def test_segments_grow_unless_the_user_has_set_the_allocator(two_gpus, monkeypatch, by_user, capability, set_):
    found = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if by_user:
        monkeypatch.setenv(by_user, "max_split_size_mb:64")
    get_backend("torch", "cpu")
    assert found == []
    get_backend("torch", "cuda:1")
    assert found == set_
