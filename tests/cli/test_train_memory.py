"""What `dualtune train` says of memory before it loads a model."""

import re
from dataclasses import replace

import pytest
from safetensors.numpy import load_file

from dualtune.engine.detect import detect
from dualtune.train import memory

PLATFORM = {"torch": "cpu", "mlx": "mlx"}


@pytest.fixture
def train(dualtune_main, config_file, tiny_llama):
    return lambda *args: dualtune_main("train", config_file({"model.name": tiny_llama}), *args)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_estimate_is_said_before_the_model_is_loaded(backend, train, open_backend):
    open_backend(backend)
    result = train("--platform", PLATFORM[backend], "--dry-run")
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("memory "))
    assert line.startswith("memory      estimated: needs ") and " MiB, has " in line
    assert "warning" not in result.stdout


@pytest.mark.parametrize("args", [("--dry-run",), ()])
def test_a_run_that_may_not_fit_is_warned_of_and_not_stopped(args, train, open_backend, monkeypatch):
    open_backend("torch")
    small = replace(detect(), available_bytes=300 * 2**20)
    monkeypatch.setattr(memory, "detect", lambda: small)
    result = train("--platform", "cpu", *args)
    assert result.returncode == 0, result.stderr
    assert "warning     it may run out of memory. Not even the shortest documents fit" in result.stdout


def test_without_a_formula_that_is_said(dualtune_main, config_file):
    result = dualtune_main("train", config_file(), "--platform", "numpy", "--dry-run")
    assert "\nmemory      not estimated: there is no estimate for the backend numpy\n" in result.stdout


def test_a_run_that_recomputes_says_so_and_trains_the_same_adapter(dualtune_main, config_file, tiny_llama, tmp_path):
    pytest.importorskip("torch")
    adapters, said = [], []
    for value in ("none", "full"):
        changes = {"model.name": tiny_llama, "run.dir": tmp_path / value, "memory.checkpointing": value}
        result = dualtune_main("train", config_file(changes), "--platform", "cpu")
        assert result.returncode == 0, result.stderr
        said.append("memory      1 of 2 layers are recomputed (as configured)" in result.stdout)
        adapter = tmp_path / value / "adapter" / "adapter_model.safetensors"
        adapters.append(adapter.read_bytes())
    assert said == [False, True]
    assert adapters[0] == adapters[1]


def test_a_run_on_a_packed_base_says_how_many_bytes_a_weight_takes(dualtune_main, config_file, tiny_llama, tmp_path):
    pytest.importorskip("torch")
    said = {}
    for value in ("none", "int8"):
        changes = {"model.name": tiny_llama, "run.dir": tmp_path / value, "model.quantization": value, "train.steps": 1}
        result = dualtune_main("train", config_file(changes), "--platform", "cpu")
        assert result.returncode == 0, result.stderr
        said[value] = re.findall("Z  (base .*)", result.stdout)
    stored = load_file(tiny_llama / "model.safetensors")
    linear = [weight for name, weight in stored.items() if name.endswith("_proj.weight")]
    each = 1 + 4 * sum(map(len, linear)) / sum(weight.size for weight in linear)  # a byte, and a scale for each row
    assert said == {
        "none": [], "int8": [f"base        {each:.3f} bytes a weight in the adapted layers, with all scales"],
    }  # fmt: skip


def test_a_run_with_streamed_layers_says_so_and_trains_the_same_adapter(
    dualtune_main, config_file, tiny_llama, tmp_path
):
    pytest.importorskip("torch")
    adapters = []
    for value in ("all", 1):
        changes = {"model.name": tiny_llama, "run.dir": tmp_path / str(value), "memory.resident_layers": value}
        result = dualtune_main("train", config_file(changes), "--platform", "cpu")
        assert result.returncode == 0, result.stderr
        adapters.append((tmp_path / str(value) / "adapter" / "adapter_model.safetensors").read_bytes())
    assert "memory      1 of 2 layers are recomputed (auto: needed by memory.resident_layers=1)" in result.stdout
    assert "Z  streaming   1 of 2 layers on the device (" in result.stdout
    assert adapters[0] == adapters[1]


def test_a_cpu_has_no_other_memory_for_activations(dualtune_main, config_file, tiny_llama):
    pytest.importorskip("torch")
    changes = {"model.name": tiny_llama, "memory.offload": "activations"}
    result = dualtune_main("train", config_file(changes), "--platform", "cpu", "--dry-run")
    assert result.returncode == 2
    assert "memory.offload: got activations, the backend 'torch' honours: auto, none" in result.stderr
