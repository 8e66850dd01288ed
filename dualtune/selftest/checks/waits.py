"""Whether the host waits for the device in the hot path of training: it should only send work."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, runtime_checkable

from dualtune.selftest.checks.engines import compared_batches, request_for, written_model
from dualtune.selftest.checks.finding import CheckFinding, DeviceCheck, Site

WARMUP, STEPS = 2, 3  # the first steps compile, and fill caches


@runtime_checkable
class CountsWaits(Protocol):
    """A backend whose framework can say where the host waited for the device."""

    def counted_waits(self) -> AbstractContextManager[list[str]] | str:
        """Return a block whose list gets the place of each wait inside it, or the reason why they cannot be counted."""
        ...


def wait_checks(quantizations: tuple[str, ...]) -> list[DeviceCheck]:
    """Return a check for the plain base, and for the 4 bits in which this device stores one."""
    stored = ("none", *(name for name in ("nf4", "affine4") if name in quantizations))
    return [
        DeviceCheck(f"waits/{name}", f"training steps do not wait for the device, base in {name}", partial(count, name))
        for name in stored
    ]


def count(quantization: str, site: Site) -> CheckFinding:
    """Count the waits of training steps, from the arrays of a micro-batch to the queued update."""
    if not isinstance(site.backend, CountsWaits):
        return CheckFinding("skipped", f"the framework of the backend {site.backend.name} does not say when it waits")
    counted = site.backend.counted_waits()
    if isinstance(counted, str):
        return CheckFinding("skipped", counted)
    pieces = frozenset((*site.card.pieces, *site.device.pieces))
    engine = site.backend.load(request_for(written_model(site, "llama"), "auto", quantization, 0.1, pieces=pieces))
    batches = compared_batches(site)

    def step() -> None:
        for batch in batches:
            engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-4, max_grad_norm=1.0)

    for _ in range(WARMUP):
        step()
    site.backend.synchronize()
    with counted as waits:
        for _ in range(STEPS):
            step()
    places = Counter(waits)
    words = "none" if not places else "; ".join(f"{number} at {place}" for place, number in places.most_common(8))
    return CheckFinding(
        "failed" if waits else "passed", f"waits in {STEPS} steps: {words}", {"waits": len(waits)}, {"waits": 0}
    )
