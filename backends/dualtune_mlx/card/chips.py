"""What is known of Apple's chips and decides how MLX computes on them. No MLX is needed to read it."""

from __future__ import annotations

import os
import re

TF32 = "MLX_ENABLE_TF32"
# GPUs of M1 and M2 have no bfloat16 (M3 was the first): Metal converts to float32 and back. In mlx's pull request 4216
# a 4-bit product on an M1 Max takes 30.6 ms in bfloat16 and 17.2 in float16; MLX's maintainers leave the choice of
# float16 to the user.
WITHOUT_BFLOAT16 = re.compile(r"Apple M[12]\b")


def emulates_bfloat16(chip: str) -> bool:
    """Return whether a chip, such as "Apple M1 Max", computes bfloat16 by way of float32."""
    return WITHOUT_BFLOAT16.match(chip) is not None


def tf32_setting() -> str:
    """Return "0" if products of float32 must be exact, else "1"; MLX reads the variable by C's atoi."""
    number = re.match(r"\s*([+-]?\d+)", os.environ.get(TF32, "1"))
    return "1" if number and int(number[1]) else "0"
