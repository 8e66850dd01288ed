"""From a machine to a verdict and to a backend, always with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from dualtune.backend import Backend, backend_names, get_backend
from dualtune.errors import ConfigError, EnvironmentFault
from dualtune.platform.detect import Machine, detect, is_installed

GIB = 2**30
PLATFORMS = ("auto", "mlx", "cuda", "cpu")
# Device memory in GB (10^9, as GPUs are sold; NVML reports a little less than the label, hence "from"), best first.
CUDA_CLASSES = ((70, "H100 class"), (24, "adequate"), (20, "low"), (0, "too small"))
MAC_CLASSES = ((32, "good"), (16, "limited"), (0, "too small"))


@dataclass(frozen=True, slots=True)
class Choice:
    platform: str  # "mlx", "cuda" or "cpu"
    backend: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool  # there is an accelerator with enough memory, and what drives it is installed
    text: str


def choose(platform: str, machine: Machine | None = None) -> Choice:
    """The backend and device for `--platform`. EnvironmentFault if nothing that could train is installed."""
    match platform:
        case "mlx":
            return Choice("mlx", "mlx", "auto", "as asked")
        case "cuda":
            return Choice("cuda", "torch", "cuda", "as asked")
        case "cpu":
            return Choice("cpu", "torch", "cpu", "as asked")
        case "auto":
            return _automatic(machine or detect())
        case name if name in backend_names():  # a third-party backend, by its entry-point name
            return Choice(name, name, "auto", "as asked")
        case unknown:
            raise ConfigError(f"--platform: got '{unknown}', allowed: {', '.join(PLATFORMS)}")


def open_backend(choice: Choice) -> Backend:
    return get_backend(choice.backend, choice.device)


def _automatic(machine: Machine) -> Choice:
    if machine.is_apple_silicon and is_installed("mlx"):
        return Choice("mlx", "mlx", "auto", f"Apple silicon ({machine.cpu}) with MLX installed")
    if machine.gpus and is_installed("torch"):
        return Choice("cuda", "torch", "cuda", f"NVIDIA GPU ({machine.gpus[0].name}) with torch installed")
    without = "no NVIDIA GPU" if not machine.is_apple_silicon else "MLX is not installed"
    if is_installed("torch"):
        return Choice("cpu", "torch", "cpu", f"{without}; torch on the CPU")
    if is_installed("mlx"):
        without = "an NVIDIA GPU, but torch is not installed" if machine.gpus else f"{without} and no torch"
        return Choice("mlx", "mlx", "auto", f"{without}; MLX on the CPU, which is slow")
    extra = "mlx" if machine.is_apple_silicon else "torch"
    raise EnvironmentFault(f"neither torch nor MLX is installed. Install one with: pip install 'dualtune[{extra}]'")


def verdict(machine: Machine) -> Verdict:
    """One sentence: can this machine fine-tune a language model, and why."""
    if machine.gpus:
        gpu = machine.gpus[0]
        label = _class_of(gpu.total_bytes / 1e9, CUDA_CLASSES)
        text = f"{gpu.name} with {gpu.total_bytes / GIB:.1f} GiB: {label}"
        if not is_installed("torch"):
            return Verdict(False, f"{text}, but torch is not installed: pip install 'dualtune[torch]'")
        return Verdict(label != "too small", text)
    if machine.is_apple_silicon:
        label = _class_of(machine.memory_bytes / GIB, MAC_CLASSES)
        text = f"{machine.cpu} with {machine.memory_bytes / GIB:.0f} GiB of unified memory: {label}"
        if not is_installed("mlx"):
            return Verdict(False, f"{text}, but MLX is not installed: pip install 'dualtune[mlx]'")
        return Verdict(label != "too small", text)
    reason = f"no NVIDIA GPU ({machine.gpu_problem})" if machine.gpu_problem else "no NVIDIA GPU is visible"
    return Verdict(False, f"{reason} and no Apple silicon; tiny models can be trained with --platform cpu")


def _class_of(memory: float, classes: tuple[tuple[int, str], ...]) -> str:
    return next(label for least, label in classes if memory >= least)
