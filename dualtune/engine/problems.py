"""Problems that keep a GPU from being used, how they are detected, and the command that fixes them.

Problems of the framework are in the card of its backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain
from typing import TYPE_CHECKING

from dualtune.base.checks import Check, Level
from dualtune.engine.card import Package, automatic_cards
from dualtune.engine.machine import Kind, Machine

if TYPE_CHECKING:  # every command reads the cards, few compare versions
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

# ----------------------------------------------------------------------------------------------------------------------
# The thresholds by which machines are judged, as data.


@dataclass(frozen=True, slots=True)
class Class:
    """A class of machines, by the longest document that QLoRA of a 7B model can train on there."""

    least: int  # tokens
    label: str
    level: Level
    meaning: str


SEVEN_B = "mistralai/Mistral-7B-Instruct-v0.3"
# Best first.
CUDA_CLASSES = (
    Class(16384, "H100 class", "ok", "of the H100 class for models of 7B"),
    Class(4096, "adequate", "ok", "adequate for models of 7B"),
    Class(512, "low", "advice", "low on memory for models of 7B"),
    Class(0, "too small", "fail", "too small for models of 7B"),
)
MAC_CLASSES = (
    Class(1536, "good", "ok", "good for models of 7B"),
    Class(512, "limited", "advice", "limited for models of 7B"),
    Class(0, "too small", "fail", "too small for models of 7B"),
)
NO_ACCELERATOR = Class(0, "no accelerator", "fail", "too slow for models of 7B")

# GB of GPU memory -> the example config made for such cards, largest first; the last one is for a small model.
CUDA_CONFIGS = ((40, "training_config_h100.yaml"), (20, "rtx_24gb.yaml"), (10, "rtx_16gb.yaml"), (0, "lora_chat.yaml"))
# GiB of unified memory -> the example config made for such Macs, likewise.
MAC_CONFIGS = ((32, "training_config_m4.yaml"), (16, "training_config_m4_16gb.yaml"), (0, "lora_chat.yaml"))
CPU_CONFIG = "cpu_smoke.yaml"

LEAST_CAPABILITY = (7, 0)  # Volta, the first with tensor cores
LEAST_CUDA = (12, 1)  # of the driver
BFLOAT16_CAPABILITY = (8, 0)  # Ampere
# CUDA 13 has no code for GPUs older than Turing, and versions before 12.8 have none for Blackwell: the support matrix
# in pytorch's RELEASE.md.
CUDA_13_CAPABILITY = (7, 5)
BLACKWELL_CAPABILITY, BLACKWELL_CUDA = (10, 0), (12, 8)


def version(text: str) -> tuple[int, ...]:
    """Return a version as numbers to compare: "13.0" is newer than "12.1", and "14" than "9"."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def device_of(machine: Machine) -> Kind:
    """Return the kind of device that a run would use: the CPU if the GPU is too old."""
    if machine.kind == "cuda" and machine.gpus[0].capability < LEAST_CAPABILITY:
        return "cpu"
    return machine.kind


def class_of(machine: Machine, longest: int) -> Class:
    """Return the class of a machine, by the longest document of SEVEN_B that fits."""
    device = device_of(machine)
    if device == "cpu":
        return NO_ACCELERATOR
    return next(one for one in (CUDA_CLASSES if device == "cuda" else MAC_CLASSES) if longest >= one.least)


# ----------------------------------------------------------------------------------------------------------------------
# The packages that dualtune requires, read from its metadata: minimum versions are only in pyproject.toml.

OURSELVES = "dualtune"


def least_python() -> SpecifierSet:
    """Return the Python versions that dualtune runs on."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(metadata.metadata(OURSELVES)["Requires-Python"])


def requirements(package: Package, system: str) -> list[Requirement]:
    """Return the requirements of dualtune, then those of a backend's package, on a system ("Linux", "Darwin")."""
    base, own = _required(OURSELVES, "", system), _required(package.distribution, package.extra, system)
    return base + [one for one in own if one not in base]


def _required(distribution: str, extra: str, system: str) -> list[Requirement]:
    """Return the requirements of `pip install 'distribution[extra]'`."""
    from packaging.requirements import Requirement

    required = [Requirement(line) for line in metadata.requires(distribution) or []]
    where = {"extra": extra, "platform_system": system}
    return [one for one in required if one.marker is None or one.marker.evaluate(where)]


def at_least(installed: str, least: str) -> bool:
    """Return whether a version is at least another: 0.10 is newer than 0.7, and 13.0 than 12.1."""
    from packaging.version import Version

    return Version(installed) >= Version(least)


def package_checks(required: list[Requirement], command: str, installed: Mapping[str, str]) -> list[Check]:
    """Return a row for each package. `command` installs all of them."""
    return [_package_check(one, command, installed.get(one.name)) for one in required]


def _package_check(required: Requirement, command: str, installed: str | None) -> Check:
    from packaging.version import InvalidVersion, Version

    needed = f"{required.name}{required.specifier}"
    if installed is None:
        return Check(required.name, "fail", f"not installed, {needed} is needed", command)
    try:
        fits = required.specifier.contains(
            Version(installed), prereleases=True
        )  # a nightly counts as its version number
    except InvalidVersion:
        fits = False
    if fits:
        return Check(required.name, "ok", installed)
    return Check(required.name, "fail", f"got {installed}, {needed} is needed", f"pip install --upgrade '{needed}'")


# ----------------------------------------------------------------------------------------------------------------------
NEW_DRIVER = "Install NVIDIA's driver 580 or newer: https://www.nvidia.com/drivers"  # required by CUDA 13
PASS_THROUGH = "docker run --gpus all … (podman: --device nvidia.com/gpu=all)"
MAKE_SLICE = "sudo nvidia-smi mig -lgip; sudo nvidia-smi mig -cgi PROFILE -C"
RESET = "nvidia-smi -q; sudo dmesg | grep NVRM; then sudo reboot"


def problems(machine: Machine) -> list[Check]:
    """Return a row for each problem of this machine: of its GPUs, then of the frameworks."""
    rows = chain(driver_problems(machine), gpu_problems(machine))
    return [*rows, *chain.from_iterable(card.problems(machine) for card in automatic_cards() if card.problems)]


def row_or_problem(fine: Check, name: str, rows: Iterable[Check]) -> Check:
    """Return the row, or the problem `name` and its fix, under the name of the row."""
    problem = next((row for row in rows if row.name == name), None)
    return replace(problem, name=fine.name) if problem else fine


def driver_problems(machine: Machine) -> Iterator[Check]:
    """Yield why the driver does not answer, or not for every GPU."""
    around, fault, words = machine.surroundings, machine.gpu_fault, machine.gpu_problem
    if fault == "no binding":
        fix = "pip install --force-reinstall nvidia-ml-py"
        yield Check("NVML", "fail", f"NVML cannot be queried: {words}", fix)

    # A container that got no device has neither a library nor a loaded driver, so it is recognized before both.
    not_passed_through = around.container and around.nvidia_card and not around.nvidia_device
    if fault in ("no library", "not loaded") and not_passed_through:
        problem = "an NVIDIA card is in the machine, but this container was started without it"
        yield Check("container", "fail", problem, PASS_THROUGH)
    elif fault == "not loaded":
        problem = f"the driver is installed, but the kernel has not loaded it ({words})"
        yield Check("driver", "fail", problem, "sudo modprobe nvidia; if that fails, reinstall the driver and reboot")

    if fault == "no library" and machine.system != "Darwin":
        if around.wsl and around.wsl_driver:
            problem = "Windows' NVIDIA driver is in /usr/lib/wsl/lib, where this shell does not look for libraries"
            yield Check("driver", "fail", problem, "export LD_LIBRARY_PATH=/usr/lib/wsl/lib")
        elif around.wsl:
            problem = "this is WSL, and Windows has no NVIDIA driver to share with it"
            fix = (
                "Install NVIDIA's driver in Windows, and none in WSL; then, in PowerShell: wsl --update; wsl --shutdown"
            )
            yield Check("driver", "fail", problem, fix)
        elif around.container and not around.nvidia_card:
            problem = "this is a container, and no NVIDIA card is passed to it"
            yield Check("container", "advice", problem, f"if the host has one: {PASS_THROUGH}")
        elif around.nvidia_card and not around.container:
            problem = f"an NVIDIA card is in the machine, but no driver ({words})"
            fix = "sudo ubuntu-drivers install && sudo reboot (elsewhere: https://www.nvidia.com/drivers)"
            yield Check("driver", "fail", problem, fix)

    if fault == "mismatch":
        problem = f"the driver was updated, but the older one is still loaded ({words})"
        yield Check("driver", "fail", problem, "sudo reboot (in a container: restart it)")
    if fault == "no permission":
        fix = "sudo usermod -aG video,render $USER, and log in again; under Slurm, request a GPU: srun --gres=gpu:1 …"
        yield Check("driver", "fail", f"this user may not use the GPU ({words})", fix)
    if fault == "other":
        yield Check("driver", "fail", f"the driver does not answer: {words}", RESET)

    # One lost GPU is advice where others are left.
    unreadable = f"the driver lists a GPU that does not answer: {', '.join(machine.unreadable_gpus)}"
    if machine.unreadable_gpus and not machine.gpus:
        yield Check("driver", "fail", unreadable, RESET)
    elif machine.unreadable_gpus:
        yield Check("driver", "advice", unreadable, f"{RESET}; until then, CUDA_VISIBLE_DEVICES without this GPU")
    if machine.gpus and machine.cuda is not None and version(machine.cuda) < LEAST_CUDA:
        problem = f"driver {machine.driver} supports CUDA up to {machine.cuda}; {dotted(LEAST_CUDA)} is needed"
        yield Check("driver", "fail", problem, NEW_DRIVER)


def gpu_problems(machine: Machine) -> Iterator[Check]:
    """Yield which GPUs programs cannot see or use, though the driver knows them."""
    if machine.mig_without_slice:
        fault = f"{', '.join(machine.mig_without_slice)}: in MIG mode, but no slice of it is visible"
        yield Check("MIG", "advice" if machine.gpus else "fail", fault, MAKE_SLICE)

    visible = machine.visible_devices
    listed = (visible or "").split(",")
    if visible is not None and machine.hidden_gpus and not machine.gpus:
        fault = f"CUDA_VISIBLE_DEVICES is '{visible}', which hides {', '.join(gpu.name for gpu in machine.hidden_gpus)}"
        yield Check("visibility", "fail", fault, "unset CUDA_VISIBLE_DEVICES")
    elif visible is not None and machine.gpus and len(listed) != len(machine.gpus):
        last = listed[len(machine.gpus)].strip()
        if last != "-1":  # the usual way to end the list
            fault = f"CUDA_VISIBLE_DEVICES is '{visible}': CUDA stops at '{last}', which is not a GPU here"
            yield Check("visibility", "advice", fault, "unset CUDA_VISIBLE_DEVICES; nvidia-smi -L lists the GPUs")

    if machine.gpus and machine.gpus[0].capability < LEAST_CAPABILITY:
        gpu = machine.gpus[0]
        fault = f"{gpu.name} has compute capability {gpu.compute_capability}; {dotted(LEAST_CAPABILITY)} is needed"
        yield Check("compute capability", "fail", fault, "Use a newer GPU, or train small models with --platform cpu")
    if installed := machine.packages.get("pynvml"):
        fault = f"the deprecated package pynvml {installed} replaces the module of nvidia-ml-py"
        fix = "pip uninstall -y pynvml; pip install --force-reinstall nvidia-ml-py"
        yield Check("pynvml", "advice", fault, fix)


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
