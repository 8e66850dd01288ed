"""The limits of this machine for a prediction: published ones for its GPU or chip, measured ones for its CPU."""

from __future__ import annotations

import time

import numpy as np

from dualtune.backend import Backend
from dualtune.bench.measure import peak_flops
from dualtune.card import card_of
from dualtune.platform.choose import PlatformChoice, open_backend
from dualtune.platform.machine import Machine
from dualtune.platform.machines import published
from dualtune.platform.rates import CPU_ELEMENTWISE, CPU_LAUNCH_S, CPU_SIDE_SHARES, MachineLimits

NUMBERS, REPEATS = 1 << 24, 5  # of an array in float32 that no cache holds


def limits_here(choice: PlatformChoice, machine: Machine, dtype: str) -> MachineLimits | None:
    """Return the limits of this machine for the device that was chosen; None if they are not known."""
    if card_of(choice.backend).kind_for(choice.platform, machine.kinds) == "cpu":
        return measured_limits(open_backend(choice), dtype)
    return published(machine)


def measured_limits(backend: Backend, dtype: str) -> MachineLimits:
    """Measure this CPU: products in a dtype, by the backend, and a copy in memory. It takes about two seconds.

    Narrow products, elementwise code and the call of an operator keep the proportions that benchmarks/predict.py found.
    """
    products = peak_flops(backend, dtype)
    plain = products if dtype == "float32" else peak_flops(backend, "float32")
    return MachineLimits(
        "measured just now", {dtype: products}, CPU_ELEMENTWISE * plain, _copied_bytes_per_s(), None, CPU_LAUNCH_S, 0.0,
        side_shares=CPU_SIDE_SHARES, is_asynchronous=False,
    )  # fmt: skip


def _copied_bytes_per_s() -> float:
    """Return the rate at which an array is copied, read and written bytes together."""
    here, there = np.ones(NUMBERS, np.float32), np.empty(NUMBERS, np.float32)
    seconds: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        np.copyto(there, here)
        seconds.append(time.perf_counter() - began)
    return 2 * here.nbytes / min(seconds)
