"""What can prevent MLX from running on a Mac, and what of a chip decides how it computes, without importing MLX."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from dualtune.base.checks import Check
from dualtune.engine.machine import Machine
from dualtune.engine.problems import dotted, row_or_problem, version

LEAST_MACOS = (14,)  # ml-explore.github.io/mlx/build/html/install.html

TF32 = "MLX_ENABLE_TF32"
# GPUs of M1 and M2 have no bfloat16 (M3 was the first): Metal converts to float32 and back. In mlx's pull request 4216
# a 4-bit product on an M1 Max takes 30.6 ms in bfloat16 and 17.2 in float16; MLX's maintainers leave the choice of
# float16 to the user.
WITHOUT_BFLOAT16 = re.compile(r"Apple M[12]\b")


def problems(machine: Machine) -> Iterator[Check]:
    """Yield a row for each problem of this Mac."""
    if machine.surroundings.rosetta:
        fault = f"this Python {machine.python} is for Intel and runs under Rosetta; MLX needs one for arm64"
        fix = "Install Python for arm64 (brew install python@3.12), and run ./setup_m4.sh"
        yield Check("Python", "fail", fault, fix)
    if not machine.is_mac_with_apple_silicon:
        return
    if machine.macos and version(machine.macos) < LEAST_MACOS:
        fault = f"macOS is {machine.macos}; MLX needs {dotted(LEAST_MACOS)} or newer"
        yield Check("macOS", "fail", fault, "System Settings > General > Software Update")
    if machine.is_apple_silicon and "mlx" not in machine.packages:
        yield Check("MLX", "fail", "MLX is not installed", "pip install 'dualtune[mlx]'")
    if emulates_bfloat16(machine.cpu):
        fault = (
            f"{machine.cpu} has none and computes it in float32; model.dtype: auto takes it all the same, for its range"
        )
        fix = "dualtune bench config.yaml --set model.dtype=float16 measures the faster one; its numbers end at 65504"
        yield Check("bfloat16", "advice", fault, fix)


def environment(machine: Machine) -> list[Check]:
    """Return the rows of `dualtune check-env` for a Mac with Apple silicon."""
    system = Check("macOS", "ok" if machine.macos else "skipped", machine.macos or "its version was not found")
    rows, native = list(problems(machine)), Check("bfloat16", "ok", f"{machine.cpu} computes it")
    return [row_or_problem(system, "macOS", rows), row_or_problem(native, "bfloat16", rows), _float32()]


def _float32() -> Check:
    if tf32_setting() == "0":
        return Check("float32", "ok", f"its products are exact ({TF32}=0)")
    text = f"{TF32}={os.environ.get(TF32)}: an M5 rounds the factors of float32 products"
    return Check("float32", "advice", text, f"unset {TF32}, and dualtune sets it to 0")


def emulates_bfloat16(chip: str) -> bool:
    """Return whether a chip, such as "Apple M1 Max", computes bfloat16 by way of float32."""
    return WITHOUT_BFLOAT16.match(chip) is not None


def tf32_setting() -> str:
    """Return "0" if products of float32 must be exact, else "1"; MLX reads the variable by C's atoi."""
    number = re.match(r"\s*([+-]?\d+)", os.environ.get(TF32, "1"))
    return "1" if number and int(number[1]) else "0"
