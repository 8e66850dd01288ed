"""From a machine to a backend, always with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualtune.errors import ConfigError, EnvironmentFault
from dualtune.platform.detect import detect, is_installed
from dualtune.platform.machine import Machine

if TYPE_CHECKING:
    from dualtune.backend import Backend

__all__ = ["PLATFORMS", "Choice", "choose", "is_installed", "open_backend"]

PLATFORMS = ("auto", "mlx", "cuda", "cpu", "cuda:N")


@dataclass(frozen=True, slots=True)
class Choice:
    platform: str  # "mlx", "cuda", "cuda:1", "cpu" or the name of a third-party backend
    backend: str
    device: str
    reason: str


def choose(platform: str, machine: Machine | None = None) -> Choice:
    """The backend and device for `--platform`. EnvironmentFault if nothing that could train is installed."""
    match platform:
        case "mlx":
            return Choice("mlx", "mlx", "auto", "as asked")
        case "cpu":
            return Choice("cpu", "torch", "cpu", "as asked")
        case "auto":
            return _automatic(machine or detect())
        case name if re.fullmatch(r"cuda(:\d+)?", name):
            return Choice(name, "torch", name, "as asked")
        case name:
            return _third_party(name)


def open_backend(choice: Choice) -> Backend:
    from dualtune.backend import get_backend

    return get_backend(choice.backend, choice.device)


def _third_party(name: str) -> Choice:
    """A backend by its entry-point name."""
    from dualtune.backend import backend_names

    if name in backend_names():
        return Choice(name, name, "auto", "as asked")
    raise ConfigError(f"--platform: got '{name}', allowed: {', '.join(PLATFORMS)}")


def _automatic(machine: Machine) -> Choice:
    has_torch, has_mlx = "torch" in machine.packages, "mlx" in machine.packages
    if machine.is_apple_silicon and has_mlx:
        return Choice("mlx", "mlx", "auto", f"Apple silicon ({machine.cpu}) with MLX installed")
    if machine.gpus and has_torch:
        return Choice("cuda", "torch", "cuda", f"NVIDIA GPU ({machine.gpus[0].name}) with torch installed")
    without = "no NVIDIA GPU" if not machine.is_apple_silicon else "MLX is not installed"
    if has_torch:
        return Choice("cpu", "torch", "cpu", f"{without}; torch on the CPU")
    if has_mlx:
        without = "an NVIDIA GPU, but torch is not installed" if machine.gpus else f"{without} and no torch"
        return Choice("mlx", "mlx", "auto", f"{without}; MLX on the CPU, which is slow")
    extra = "mlx" if machine.is_apple_silicon else "torch"
    raise EnvironmentFault(f"neither torch nor MLX is installed. Install one with: pip install 'dualtune[{extra}]'")
