"""Problems that keep a GPU from being used, how they are detected, and the command that fixes them.

Problems of the framework are in the card of its backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dualtune.base.checks import Check, Level
from dualtune.engine.card import Package, automatic_cards
from dualtune.engine.machine import Kind, Machine

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
    Class(16384, "H100 class", "ok", "of the H100 class"),
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
    return SpecifierSet(metadata.metadata(OURSELVES)["Requires-Python"])


def requirements(package: Package, system: str) -> list[Requirement]:
    """Return the requirements of dualtune, then those of a backend's package, on a system ("Linux", "Darwin")."""
    base, own = _required(OURSELVES, "", system), _required(package.distribution, package.extra, system)
    return base + [one for one in own if one not in base]


def _required(distribution: str, extra: str, system: str) -> list[Requirement]:
    """Return the requirements of `pip install 'distribution[extra]'`."""
    required = [Requirement(line) for line in metadata.requires(distribution) or []]
    where = {"extra": extra, "platform_system": system}
    return [one for one in required if one.marker is None or one.marker.evaluate(where)]


def at_least(installed: str, least: str) -> bool:
    """Return whether a version is at least another: 0.10 is newer than 0.7, and 13.0 than 12.1."""
    return Version(installed) >= Version(least)


def package_checks(required: list[Requirement], command: str, installed: Mapping[str, str]) -> list[Check]:
    """Return a row for each package. `command` installs all of them."""
    return [_package_check(one, command, installed.get(one.name)) for one in required]


def _package_check(required: Requirement, command: str, installed: str | None) -> Check:
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


@dataclass(frozen=True, slots=True)
class KnownProblem:
    """A possible problem. `found` returns a sentence, or None on a machine without the problem."""

    name: str
    level: Level
    found: Callable[[Machine], str | None]
    fix: str | Callable[[Machine], str]


def problems(machine: Machine) -> list[Check]:
    """Return a row for each problem of this machine: of its GPUs, then of the frameworks."""
    own = [card.problems(machine) for card in automatic_cards() if card.problems]
    return [*found_on(machine, PROBLEMS), *chain.from_iterable(own)]


def found_on(machine: Machine, table: Sequence[KnownProblem]) -> list[Check]:
    """Return a row for each problem in a table that this machine has."""
    rows: list[Check] = []
    for problem in table:
        if found := problem.found(machine):
            fix = problem.fix if isinstance(problem.fix, str) else problem.fix(machine)
            rows.append(Check(problem.name, problem.level, found, fix))
    return rows


def row_or_problem(fine: Check, name: str, rows: Sequence[Check]) -> Check:
    """Return the row, or the problem `name` and its fix, under the name of the row."""
    problem = next((row for row in rows if row.name == name), None)
    return replace(problem, name=fine.name) if problem else fine


# --- the driver ------------------------------------------------------------------------------------------------------


def _no_binding(machine: Machine) -> str | None:
    return f"NVML cannot be queried: {machine.gpu_problem}" if machine.gpu_fault == "no binding" else None


def _library_missing(machine: Machine) -> bool:
    return machine.gpu_fault == "no library" and machine.system != "Darwin"


def _wsl_path(machine: Machine) -> str | None:
    around = machine.surroundings
    if _library_missing(machine) and around.wsl and around.wsl_driver:
        return "Windows' NVIDIA driver is in /usr/lib/wsl/lib, where this shell does not look for libraries"
    return None


def _wsl_driver(machine: Machine) -> str | None:
    around = machine.surroundings
    if _library_missing(machine) and around.wsl and not around.wsl_driver:
        return "this is WSL, and Windows has no NVIDIA driver to share with it"
    return None


def _not_passed_through(machine: Machine) -> str | None:
    around = machine.surroundings
    if machine.gpu_fault not in ("no library", "not loaded") or not around.container or around.nvidia_device:
        return None
    return "an NVIDIA card is in the machine, but this container was started without it" if around.nvidia_card else None


def _hidden_by_container(machine: Machine) -> str | None:
    around = machine.surroundings
    if _library_missing(machine) and around.container and not (around.nvidia_card or around.wsl):
        return "this is a container, and no NVIDIA card is passed to it"
    return None


def _no_driver(machine: Machine) -> str | None:
    around = machine.surroundings
    if _library_missing(machine) and around.nvidia_card and not (around.container or around.wsl):
        return f"an NVIDIA card is in the machine, but no driver ({machine.gpu_problem})"
    return None


def _not_loaded(machine: Machine) -> str | None:
    if machine.gpu_fault != "not loaded" or _not_passed_through(machine):
        return None
    return f"the driver is installed, but the kernel has not loaded it ({machine.gpu_problem})"


def _mismatch(machine: Machine) -> str | None:
    if machine.gpu_fault != "mismatch":
        return None
    return f"the driver was updated, but the older one is still loaded ({machine.gpu_problem})"


def _no_permission(machine: Machine) -> str | None:
    if machine.gpu_fault != "no permission":
        return None
    return f"this user may not use the GPU ({machine.gpu_problem})"


def _other_fault(machine: Machine) -> str | None:
    return f"the driver does not answer: {machine.gpu_problem}" if machine.gpu_fault == "other" else None


def _unreadable(machine: Machine) -> str | None:
    names = ", ".join(machine.unreadable_gpus)
    return f"the driver lists a GPU that does not answer: {names}" if names else None


def _all_unreadable(machine: Machine) -> str | None:
    return None if machine.gpus else _unreadable(machine)


def _some_unreadable(machine: Machine) -> str | None:
    return _unreadable(machine) if machine.gpus else None


def _old_driver(machine: Machine) -> str | None:
    if not machine.gpus or machine.cuda is None or version(machine.cuda) >= LEAST_CUDA:
        return None
    return f"driver {machine.driver} supports CUDA up to {machine.cuda}; {dotted(LEAST_CUDA)} is needed"


# --- which GPUs are visible ------------------------------------------------------------------------------------------


def _mig_without_slice(machine: Machine) -> str | None:
    names = ", ".join(machine.mig_without_slice)
    return f"{names}: in MIG mode, but no slice of it is visible" if names else None


def _only_mig(machine: Machine) -> str | None:
    return None if machine.gpus else _mig_without_slice(machine)


def _mig_among_others(machine: Machine) -> str | None:
    return _mig_without_slice(machine) if machine.gpus else None


def _all_hidden(machine: Machine) -> str | None:
    if machine.visible_devices is None or machine.gpus or not machine.hidden_gpus:
        return None
    names = ", ".join(gpu.name for gpu in machine.hidden_gpus)
    return f"CUDA_VISIBLE_DEVICES is '{machine.visible_devices}', which hides {names}"


def _some_ignored(machine: Machine) -> str | None:
    listed = (machine.visible_devices or "").split(",")
    if not machine.gpus or machine.visible_devices is None or len(listed) == len(machine.gpus):
        return None
    last = listed[len(machine.gpus)].strip()
    if last == "-1":
        return None  # the usual way to end the list
    return f"CUDA_VISIBLE_DEVICES is '{machine.visible_devices}': CUDA stops at '{last}', which is not a GPU here"


def _old_gpu(machine: Machine) -> str | None:
    if not machine.gpus or machine.gpus[0].capability >= LEAST_CAPABILITY:
        return None
    gpu = machine.gpus[0]
    return f"{gpu.name} has compute capability {gpu.compute_capability}; {dotted(LEAST_CAPABILITY)} is needed"


def _deprecated_binding(machine: Machine) -> str | None:
    installed = machine.packages.get("pynvml")
    return f"the deprecated package pynvml {installed} replaces the module of nvidia-ml-py" if installed else None


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


# --- the table -------------------------------------------------------------------------------------------------------

PASS_THROUGH = "docker run --gpus all … (podman: --device nvidia.com/gpu=all)"
MAKE_SLICE = "sudo nvidia-smi mig -lgip; sudo nvidia-smi mig -cgi PROFILE -C"
RESET = "nvidia-smi -q; sudo dmesg | grep NVRM; then sudo reboot"
PROBLEMS = (
    KnownProblem("NVML", "fail", _no_binding, "pip install --force-reinstall nvidia-ml-py"),
    KnownProblem("driver", "fail", _wsl_path, "export LD_LIBRARY_PATH=/usr/lib/wsl/lib"),
    KnownProblem(
        "driver",
        "fail",
        _wsl_driver,
        "Install NVIDIA's driver in Windows, and none in WSL; then, in PowerShell: wsl --update; wsl --shutdown",
    ),
    KnownProblem("container", "fail", _not_passed_through, PASS_THROUGH),
    KnownProblem("container", "advice", _hidden_by_container, f"if the host has one: {PASS_THROUGH}"),
    KnownProblem(
        "driver",
        "fail",
        _no_driver,
        "sudo ubuntu-drivers install && sudo reboot (elsewhere: https://www.nvidia.com/drivers)",
    ),
    KnownProblem("driver", "fail", _not_loaded, "sudo modprobe nvidia; if that fails, reinstall the driver and reboot"),
    KnownProblem("driver", "fail", _mismatch, "sudo reboot (in a container: restart it)"),
    KnownProblem(
        "driver",
        "fail",
        _no_permission,
        "sudo usermod -aG video,render $USER, and log in again; under Slurm, request a GPU: srun --gres=gpu:1 …",
    ),
    KnownProblem("driver", "fail", _other_fault, RESET),
    KnownProblem("driver", "fail", _all_unreadable, RESET),
    KnownProblem("driver", "advice", _some_unreadable, f"{RESET}; until then, CUDA_VISIBLE_DEVICES without this GPU"),
    KnownProblem("driver", "fail", _old_driver, NEW_DRIVER),
    KnownProblem("MIG", "fail", _only_mig, MAKE_SLICE),
    KnownProblem("MIG", "advice", _mig_among_others, MAKE_SLICE),
    KnownProblem("visibility", "fail", _all_hidden, "unset CUDA_VISIBLE_DEVICES"),
    KnownProblem("visibility", "advice", _some_ignored, "unset CUDA_VISIBLE_DEVICES; nvidia-smi -L lists the GPUs"),
    KnownProblem("compute capability", "fail", _old_gpu, "Use a newer GPU, or train small models with --platform cpu"),
    KnownProblem(
        "pynvml", "advice", _deprecated_binding, "pip uninstall -y pynvml; pip install --force-reinstall nvidia-ml-py"
    ),
)
