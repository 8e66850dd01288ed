"""The used memory of a GPU by NVML, with a made-up driver."""

from types import SimpleNamespace

import pytest

from dualtune.train.profiler.snapshot import DeviceSample, device_reader

MIB = 2**20


@pytest.fixture
def two_gpus(nvml, card, monkeypatch):
    """A driver with two GPUs of 1000 MiB, of which 100 and 200 are in use, and 7 more are the driver's own."""
    fake = nvml(card("A", 1000, 900, uuid="GPU-a"), card("B", 1000, 800, uuid="GPU-b"))

    def used(handle, version=None):
        own = 0 if version == "second" else 7
        return SimpleNamespace(used=(handle.mib - handle.free_mib + own) * MIB, total=0, free=0)

    by_uuid = {each.uuid: each for each in fake._cards}
    monkeypatch.setattr(fake, "nvmlDeviceGetHandleByUUID", by_uuid.__getitem__, raising=False)
    monkeypatch.setattr(fake, "nvmlDeviceGetMemoryInfo", used)
    monkeypatch.setattr(fake, "nvmlDeviceGetUtilizationRates", lambda card: SimpleNamespace(gpu=50), raising=False)
    monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", lambda card: 1000, raising=False)
    return fake


def used_by(device):
    return device_reader(device)().used_bytes


def test_the_gpu_of_the_engine_is_read(two_gpus, monkeypatch):
    assert used_by("cuda:0") == 107 * MIB and used_by("cuda:1") == 207 * MIB
    assert used_by("cuda") == 107 * MIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert used_by("cuda:0") == 207 * MIB and device_reader("cuda:1") is None


def test_the_share_of_the_driver_is_left_out_where_nvml_can_tell(two_gpus, monkeypatch):
    monkeypatch.setattr(two_gpus, "nvmlMemory_v2", "second", raising=False)
    assert used_by("cuda:0") == 100 * MIB


@pytest.mark.parametrize("device", ["cpu", "metal", ""])
def test_other_devices_have_none(two_gpus, device):
    assert device_reader(device) is None


def test_without_a_binding_or_a_driver_there_is_none(nvml, card, monkeypatch):
    nvml(card("A", 1000, 900), init_error=(9, "not loaded"))
    assert device_reader("cuda:0") is None
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert device_reader("cuda:0") is None


def test_a_gpu_that_denies_its_memory_has_none(two_gpus, monkeypatch):
    def denied(*args):
        raise two_gpus.NVMLError(4, "no permission")

    monkeypatch.setattr(two_gpus, "nvmlDeviceGetHandleByUUID", denied)
    assert device_reader("cuda:0") is None


def test_use_and_power_are_sampled_once_a_second_and_memory_each_time(two_gpus, monkeypatch):
    asked, now = [], [10.0]
    rates = {"GPU-a": 97, "GPU-b": 12}

    def utilization(card):
        asked.append(card.uuid)
        return SimpleNamespace(gpu=rates[card.uuid])

    monkeypatch.setattr(two_gpus, "nvmlDeviceGetUtilizationRates", utilization)
    monkeypatch.setattr(two_gpus, "nvmlDeviceGetPowerUsage", lambda card: 512_340, raising=False)  # milliwatts
    read = device_reader("cuda:1", lambda: now[0])
    assert read() == DeviceSample(207 * MIB, 12, 512.34)
    now[0] += 0.9
    assert read() == DeviceSample(207 * MIB)
    now[0] += 0.2
    assert read() == DeviceSample(207 * MIB, 12, 512.34) and asked == ["GPU-b", "GPU-b"]


def test_a_gpu_that_does_not_say_its_power_has_none(two_gpus, monkeypatch):
    def unsupported(card):
        raise two_gpus.NVMLError(3, "not supported")

    for question in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"):
        monkeypatch.setattr(two_gpus, question, unsupported, raising=False)
    assert device_reader("cuda:0")() == DeviceSample(107 * MIB)
