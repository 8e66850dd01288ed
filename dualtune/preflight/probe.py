"""Prove that a device computes: import its framework and multiply two matrices."""

from __future__ import annotations

import time

from dualtune.checks import Check
from dualtune.errors import DualtuneError
from dualtune.platform.choose import choose, open_backend
from dualtune.platform.machine import Machine

SIZE, DTYPE = 1024, "float32"


def probe(machine: Machine) -> Check:
    """Return a row that says which device computed the product, or why none did."""
    try:
        backend = open_backend(choose("auto", machine))
        device = backend.devices()[0].name
        product = backend.matmul(SIZE, DTYPE)
        product()  # the first one also loads the device's libraries
        began = time.perf_counter()
        product()
    # torch raises RuntimeError for every CUDA error; loading a missing library raises OSError.
    except (DualtuneError, RuntimeError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Check("probe", "fail", f"no matrix product: {lines[0]}", "dualtune check-env says what is missing")
    elapsed_ms = (time.perf_counter() - began) * 1e3
    return Check(
        "probe", "ok", f"{backend.name} multiplied two {SIZE} x {SIZE} matrices on {device}: {elapsed_ms:.1f} ms"
    )
