"""What can prevent MLX from running on a Mac, found without importing MLX."""

from __future__ import annotations

from dualtune.checks import Check
from dualtune.platform.machine import Machine
from dualtune.preflight.problems import KnownProblem, dotted, found_on, row_or_problem
from dualtune.preflight.thresholds import version

LEAST_MACOS = (14,)  # ml-explore.github.io/mlx/build/html/install.html


def problems(machine: Machine) -> list[Check]:
    """Return a row for each problem of this machine."""
    return found_on(machine, PROBLEMS)


def environment(machine: Machine) -> list[Check]:
    """Return the rows of `dualtune check-env` for a Mac with Apple silicon."""
    system = Check("macOS", "ok" if machine.macos else "skipped", machine.macos or "its version was not found")
    return [row_or_problem(system, "macOS", problems(machine))]


def _rosetta(machine: Machine) -> str | None:
    if not machine.surroundings.rosetta:
        return None
    return f"this Python {machine.python} is for Intel and runs under Rosetta; MLX needs one for arm64"


def _no_mlx(machine: Machine) -> str | None:
    return "MLX is not installed" if machine.is_apple_silicon and "mlx" not in machine.packages else None


def _old_macos(machine: Machine) -> str | None:
    if not machine.is_mac_with_apple_silicon or not machine.macos or version(machine.macos) >= LEAST_MACOS:
        return None
    return f"macOS is {machine.macos}; MLX needs {dotted(LEAST_MACOS)} or newer"


PROBLEMS = (
    KnownProblem(
        "Python", "fail", _rosetta, "Install Python for arm64 (brew install python@3.12), and run ./setup_m4.sh"
    ),
    KnownProblem("macOS", "fail", _old_macos, "System Settings > General > Software Update"),
    KnownProblem("MLX", "fail", _no_mlx, "pip install 'dualtune[mlx]'"),
)
