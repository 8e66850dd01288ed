"""The list of all checks for a device, in the order in which they run."""

from __future__ import annotations

from dualtune.doctor.selftest.case import SIZES, DeviceCheck
from dualtune.doctor.selftest.correctness import kernel_checks, number_checks, recorded_checks, resume_checks
from dualtune.doctor.selftest.cost import device_check, memory_checks, speed_check, wait_checks
from dualtune.engine.card import Card, Device


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
