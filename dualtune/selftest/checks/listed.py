"""The list of all checks for a device, in the order in which they run."""

from __future__ import annotations

from dualtune.card import Card, Device
from dualtune.selftest.checks.device import device_check
from dualtune.selftest.checks.finding import DeviceCheck
from dualtune.selftest.checks.kernels import kernel_checks
from dualtune.selftest.checks.memory import memory_checks
from dualtune.selftest.checks.numbers import number_checks
from dualtune.selftest.checks.recorded import recorded_checks
from dualtune.selftest.checks.resume import resume_checks
from dualtune.selftest.checks.sizes import SIZES
from dualtune.selftest.checks.speed import speed_check
from dualtune.selftest.checks.waits import wait_checks


def checks_for(card: Card, device: Device) -> list[DeviceCheck]:
    """Return the checks for a device of a backend. Known without a framework: each may run in a process of its own."""
    return [
        device_check(),
        *number_checks(),
        *kernel_checks(card, device),
        *wait_checks(device.quantizations),
        *resume_checks(device.kind),
        *recorded_checks(("float32", device.auto_dtype)),
        *memory_checks(SIZES[device.kind]),
        speed_check(),
    ]
