"""The device itself: that it is there, and how fast it multiplies matrices."""

from __future__ import annotations

from dataclasses import asdict

from dualtune.bench.measure import peak_flops
from dualtune.selftest.checks.finding import CheckFinding, DeviceCheck, Site


def device_check() -> DeviceCheck:
    """Return the check that comes first: without a device, none of the others says anything."""
    return DeviceCheck("device", "the device multiplies matrices", multiply)


def multiply(site: Site) -> CheckFinding:
    """Measure the product of two large matrices in the dtypes that the other checks use."""
    devices = site.backend.devices()
    dtypes = dict.fromkeys((site.device.auto_dtype, "float32"))
    speeds = {dtype: peak_flops(site.backend, dtype) for dtype in dtypes}
    found = ", ".join(f"{speed / 1e12:.2f} TFLOP/s in {dtype}" for dtype, speed in speeds.items())
    figures = {"devices": [asdict(device) for device in devices], "flops_per_s": speeds}
    return CheckFinding("passed", f"{devices[0].name or 'a processor'} ({devices[0].kind}): {found}", figures)
