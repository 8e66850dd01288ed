"""The errors of a shortage: each backend knows its own, no fallback swallows one, and a real one on a CPU."""

import errno
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import DeviceFault, OutOfMemory
from dualtune.base.text import in_bytes
from dualtune.engine.backend import LoadRequest
from dualtune.engine.memory.estimate import ask_of, estimate
from dualtune.engine.memory.shapes import decoder_of
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.config_file import read_config
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.recovery import explained, explanation

SPEC = AdapterSpec(2, 4.0, 0.3, ("all-linear",))


def request_for(model):
    return LoadRequest(model, "auto", "auto", "pretrained", SPEC, OptimizerSpec(), seed=1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        ("torch", "MemoryError: std::bad_alloc"),  # of the compiler, in an error of its own
        ("torch", "can't start new thread"),
        ("torch", "could not create a primitive"),
        ("torch", "CUDA out of memory. Tried to allocate 20.00 MiB"),
        ("torch", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ("torch", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        ("torch", "CUDA driver error: out of memory"),
        ("torch", "Triton Error [CUDA]: out of memory"),
        ("mlx", "[malloc] Unable to allocate 1073741824 bytes."),
        ("mlx", "[metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum allowed"),
        ("mlx", "[METAL] Command buffer execution failed: Insufficient Memory "
                "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"),
        ("mlx", "[METAL] Command buffer execution failed: Impacting Interactivity "
                "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"),
        ("mlx", "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
                "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)"),
    ],
)  # fmt: skip
def test_a_backend_knows_its_own_shortages(open_backend, name, text):
    backend = open_backend(name)
    assert backend.is_out_of_memory(RuntimeError(text)) and backend.is_out_of_memory(MemoryError())
    assert not backend.is_device_fault(RuntimeError(text))
    assert not backend.is_out_of_memory(ValueError(text))
    assert not backend.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not backend.is_out_of_memory(RuntimeError("could not create a primitive descriptor for a matmul primitive"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch", "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in …"),
        ("torch", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`"),
        ("torch", "Triton Error [CUDA]: an illegal memory access was encountered"),
        ("mlx", "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
                "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"),
    ],
)  # fmt: skip
def test_a_backend_knows_the_faults_of_its_device(open_backend, tiny_llama, make_config, name, text):
    backend = open_backend(name)
    assert backend.is_device_fault(RuntimeError(text)) and not backend.is_out_of_memory(RuntimeError(text))
    for other in ("CUDA error: out of memory", "[METAL] … kIOGPUCommandBufferCallbackErrorOutOfMemory", "shapes"):
        assert not backend.is_device_fault(RuntimeError(other))
    with (
        pytest.raises(DeviceFault, match="the device failed in training") as caught,
        explained(backend, make_config("unused"), "in training"),
    ):
        raise RuntimeError(text)
    assert text.splitlines()[0] in str(caught.value)


def test_torch_knows_a_shortage_that_the_system_reports(open_backend):
    backend = open_backend("torch")
    assert backend.is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not backend.is_out_of_memory(OSError(errno.ENOENT, "No such file or directory"))


@pytest.mark.parametrize("place", ["packed", "compare"])
def test_no_shortage_is_taken_for_a_model_with_other_code(open_backend, tiny_llama, monkeypatch, place):
    backend = open_backend("torch")
    import torch

    from dualtune_torch.kernels import choose

    monkeypatch.setattr(choose, place, lambda *inputs: torch.empty(1 << 60, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        backend.load(request_for(tiny_llama))


def test_what_layers_wait_for_is_dropped(open_backend, tmp_path, monkeypatch):
    """The second of the layers that share an input fails: the outputs of the others are still held."""
    backend = open_backend("torch")
    from dualtune_torch.kernels.lora import LoRAGroup

    engine, batch = backend.load(request_for(write_tiny_llama(tmp_path / "model"))), random_batch([9, 16], 96)
    groups = {layer.group for layer in engine._layers.values()}
    call, calls = LoRAGroup.__call__, []

    def fail_at_second(group, layer, x_BTI):
        calls.append(layer)
        return call(group, layer, x_BTI) if len(calls) != 2 else np.empty(1 << 60, np.uint8)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(LoRAGroup, "__call__", fail_at_second)
        engine.forward_backward(batch, divisor=1)
    assert any(group._outputs.waiting for group in groups)
    engine.discard()
    assert not any(each._outputs.waiting or each._outputs.x is not None or each.recompute for each in groups)


def test_what_layers_wait_for_is_dropped_on_mlx(open_backend, tmp_path, monkeypatch):
    backend = open_backend("mlx")
    from dualtune_mlx.lora import SharedInput

    engine, batch = backend.load(request_for(write_tiny_llama(tmp_path / "model"))), random_batch([9, 16], 96)
    shared = {layer.shared for layer in engine._layers.values()}
    product, calls = SharedInput.product, []

    def fail_at_second(self, weights, x_BTI):
        calls.append(weights)
        if len(calls) == 2:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return product(self, weights, x_BTI)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="Unable"):
        patch.setattr(SharedInput, "product", fail_at_second)
        engine.forward_backward(batch, divisor=1)
    assert not any(each._products.waiting for each in shared)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="Unable"):
        patch.setattr(SharedInput, "product", fail_at_second)
        calls.clear()
        engine.evaluate(batch)
    assert any(each._products.waiting for each in shared)
    engine.discard()
    assert not any(each._products.waiting or each._products.x is not None for each in shared)


# --- what the message says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_settings_of_the_message_are_the_planners_with_the_bytes_that_each_saves(
    open_backend, make_config, backend
):
    """The oracle: the estimates of the config with and without the setting."""
    backend = open_backend(backend)
    base = {"data.max_length": 512, "train.micro_batch_tokens": 1024}

    def total(**changes):
        config = make_config("rows.jsonl", base | {key.replace("__", "."): value for key, value in changes.items()})
        decoder = decoder_of(read_config(Path(config.model.name)))
        return estimate(decoder, ask_of(config, decoder, backend.name, "cpu")).total_bytes

    four_bit = {"torch": "nf4", "mlx": "affine4"}[backend.name]
    smaller = {
        "memory.checkpointing=full": total(memory__checkpointing="full"),
        "train.micro_batch_tokens=512": total(train__micro_batch_tokens=512),
        f"model.quantization={four_bit}": total(model__quantization=four_bit),
    }
    said = explanation(backend, make_config("rows.jsonl", base), "while it was tested").splitlines()
    assert said[0] == "out of memory: while it was tested"
    assert f"it needs {in_bytes(total())}:" in said[1]
    for line, (setting, less) in zip(said[3:], smaller.items(), strict=True):
        assert line.split()[:2] == ["--set", setting] and f"saves {in_bytes(total() - less)};" in line


def test_a_model_without_an_estimate_gets_settings_too(open_backend, make_config, tiny_softmax):
    said = explanation(open_backend("torch"), make_config("rows.jsonl", model=tiny_softmax), "x").splitlines()
    assert said[1].startswith("The peak so far is ")
    settings = [line.split()[1] for line in said[3:]]
    assert settings == ["memory.checkpointing=full", "train.micro_batch_tokens=64", "model.quantization=nf4"]


def test_a_setting_that_saves_nothing_is_not_in_the_message(open_backend, make_config):
    """With so large an adapter MLX's peak is in the optimizer's step: recomputation saves none."""
    large = {"adapter.rank": 256, "train.micro_batch_tokens": 64}
    said = explanation(open_backend("mlx"), make_config("rows.jsonl", large), "x").splitlines()
    settings = [line.split()[1].partition("=")[0] for line in said[3:]]
    assert settings == ["model.quantization", "data.max_length", "model.dtype"]


# --- a real shortage -------------------------------------------------------------------------------------------------

REAL = Path(__file__).with_name("short_of_memory.py")


@pytest.fixture
def real(python, tiny_llama, tmp_path):
    """A run on torch whose process may allocate so many MB more when training begins: (its end, its rows)."""
    pytest.importorskip("torch")
    if not sys.platform.startswith("linux"):
        pytest.skip("RLIMIT_DATA counts allocations only on Linux")

    def run(megabytes, words):
        result = python(REAL, tiny_llama, tmp_path, megabytes, words)
        return result, rows_in(tmp_path)

    return run


def rows_in(home):
    return [json.loads(row) for row in (home / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_real_shortage_on_a_cpu_is_recovered_from(real, tiny_llama, tmp_path):
    result, rows = real(100, 8)
    assert result.returncode == 0, result.stderr
    assert [row for row in rows if row.get("event") == "out_of_memory"]
    (tmp_path / "enough").mkdir()
    runpy.run_path(str(REAL))["main"](tiny_llama, tmp_path / "enough", None, 8)
    enough = rows_in(tmp_path / "enough")
    assert not [row for row in enough if row.get("event") == "out_of_memory"]
    losses = [[row["loss"] for row in found if "lr" in row] for found in (rows, enough)]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.long
def test_a_real_shortage_for_a_single_document_ends_with_8(real):
    result, rows = real(10, 3000)
    assert result.returncode == OutOfMemory.exit_code, result.stderr
    assert "DefaultCPUAllocator" in result.stderr and result.stderr.count("--set") == 3
    assert "Traceback" not in result.stderr and not [row for row in rows if "lr" in row]
