"""What stands in the way of a GPU: each problem is told from its neighbours, with the command that fixes it."""

import inspect
import re
from dataclasses import replace

import pytest

from dualtune.engine.machine import Surroundings
from dualtune.engine.machines import named
from dualtune.engine.problems import driver_problems, gpu_problems, problems
from dualtune_mlx.card import checks as mlx
from dualtune_torch.card import checks as torch

CARD = {"nvidia_card": True}
BARE = replace(named("cpu-64"), gpu_problem="NVML says", gpu_fault="no library")
H100 = named("h100-80")
HIDDEN = replace(H100, gpus=[], hidden_gpus=tuple(H100.gpus))


def at(fault="no library", **around):
    return replace(BARE, gpu_fault=fault, surroundings=Surroundings(**around))


CASES = [  # machine, the name and level of the only row, words of what is found, words of what fixes it
    (at(**CARD), "driver", "fail", "no driver (NVML says)", "sudo ubuntu-drivers install"),
    (at("not loaded", **CARD), "driver", "fail", "has not loaded it", "sudo modprobe nvidia"),
    (at("mismatch"), "driver", "fail", "was updated, but the older one is still loaded", "sudo reboot"),
    (at("no permission"), "driver", "fail", "may not use the GPU", "usermod -aG video,render $USER"),
    (at("other"), "driver", "fail", "does not answer: NVML says", "dmesg"),
    (at("no binding"), "NVML", "fail", "NVML says", "pip install --force-reinstall nvidia-ml-py"),
    (at(wsl=True), "driver", "fail", "Windows has no NVIDIA driver", "wsl --update"),
    (at(wsl=True, wsl_driver=True), "driver", "fail", "/usr/lib/wsl/lib", "export LD_LIBRARY_PATH=/usr/lib/wsl/lib"),
    (at(container=True, **CARD), "container", "fail", "started without it", "docker run --gpus all"),
    (at("not loaded", container=True, **CARD), "container", "fail", "started without it", "docker run --gpus all"),
    (at("not loaded", container=True, nvidia_device=True, **CARD), "driver", "fail", "not loaded it", "modprobe"),
    (at(container=True), "container", "advice", "no NVIDIA card is passed to it", "docker run --gpus all"),
    (replace(H100, gpus=[], mig_without_slice=("NVIDIA A100",)), "MIG", "fail", "NVIDIA A100: in MIG mode",
     "nvidia-smi mig -cgi"),
    (replace(H100, mig_without_slice=("NVIDIA A100",)), "MIG", "advice", "no slice of it is visible", "mig -cgi"),
    (replace(H100, gpus=[], unreadable_gpus=("GPU 0 (lost)",)), "driver", "fail", "answer: GPU 0 (lost)", "dmesg"),
    (replace(H100, unreadable_gpus=("GPU 1 (lost)",)), "driver", "advice", "answer: GPU 1 (lost)", "without this GPU"),
    (replace(HIDDEN, visible_devices=""), "visibility", "fail", "'', which hides NVIDIA H100", "unset CUDA_VISIBLE"),
    (replace(HIDDEN, visible_devices="7"), "visibility", "fail", "'7', which hides NVIDIA H100", "unset CUDA_VISIBLE"),
    (replace(H100, visible_devices="0,7"), "visibility", "advice", "stops at '7'", "nvidia-smi -L"),
    (replace(H100, packages=H100.packages | {"pynvml": "11.5"}), "pynvml", "advice", "deprecated package pynvml 11.5",
     "pip uninstall -y pynvml"),
    (replace(H100, cuda="12.0", torch_cuda="12.0"), "driver", "fail", "12.1 is needed", "driver 580 or newer"),
    (named("p100"), "compute capability", "fail", "6.0; 7.0 is needed", "--platform cpu"),
    (replace(H100, torch_cuda="none", cuda="12.4"), "torch", "fail", "without CUDA", "whl/cu126"),
    (replace(H100, torch_cuda="none"), "torch", "fail", "without CUDA", "pip install --force-reinstall torch"),
    (replace(H100, cuda="12.9"), "torch", "fail", "built for CUDA 13.0, but driver", "driver 580 or newer"),
    (replace(named("v100-16"), torch_cuda="13.0"), "torch", "fail", "no code for compute capability 7.0", "cu126"),
    (replace(named("b200"), torch_cuda="12.6", cuda="12.8"), "torch", "fail", "no code for compute capability 10.0",
     "driver 580 or newer"),
    (named("m2-ultra-192"), "bfloat16", "advice", "Apple M2 Ultra has none", "model.dtype=float16"),
    (replace(named("m4-32"), macos="13.6.1"), "macOS", "fail", "13.6.1; MLX needs 14", "Software Update"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "name", "level", "found", "fix"), CASES)
def test_a_problem_is_named_alone_with_what_fixes_it(machine, name, level, found, fix):
    (row,) = problems(machine)
    assert (row.name, row.level) == (name, level)
    assert found in row.found and fix in row.fix


@pytest.mark.parametrize(
    "machine",
    [
        H100,
        named("m4-32"),
        named("cpu-64"),
        named("v100-32"),
        replace(H100, cuda="13.2"),
        replace(H100, torch_cuda="12.8", cuda="12.2"),  # an older driver of the same major version will do
        replace(H100, torch_cuda=None),  # a build that does not tell
        replace(H100, visible_devices="0,-1"),
        replace(H100, visible_devices="GPU-abc"),
        replace(named("m4-32"), macos="26.0"),
        replace(named("m4-32"), gpu_fault="no library"),  # every Mac
    ],
)
def test_a_machine_without_a_problem_is_told_none(machine):
    assert problems(machine) == []


def test_every_problem_is_tested():
    tables = (driver_problems, gpu_problems, torch.problems, mlx.problems)
    seen = {(of.__module__, line) for of in tables for machine, *_ in CASES for line in lines_yielding(of(machine))}
    every = {(of.__module__, line): text for of in tables for line, text in yields_in(of).items()}
    untested = sorted(re.search(r'"(.*?)"', every[place])[1] for place in every.keys() - seen)
    assert untested == ["MLX", "Python", "torch"]  # not installed, or for Intel: in test_machines.py


def lines_yielding(rows):
    for _ in rows:
        yield rows.gi_frame.f_lineno


def yields_in(function):
    lines, first = inspect.getsourcelines(function)
    return {first + i: line for i, line in enumerate(lines) if line.strip().startswith("yield ")}
