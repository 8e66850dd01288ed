"""The memory of training steps: the estimate beside the peak, and what the allocator keeps beyond it."""

from __future__ import annotations

from functools import partial

from dualtune.backend import Batch, Engine
from dualtune.memory.ask import Estimate
from dualtune.memory.estimate import estimate
from dualtune.memory.shapes import decoder_of
from dualtune.selftest.checks.engines import ask_for, loaded_shape, train_on
from dualtune.selftest.checks.finding import CheckFinding, DeviceCheck, Site, judged
from dualtune.selftest.checks.sizes import Sizes, TrainedShape
from dualtune.text.show import in_bytes
from dualtune.train.memory import RESERVE

# The peak may be this share above or below the estimate of all arrays. On CPUs the tests allow as much for steps that
# are not compiled. CUDA's allocator also counts workspaces of libraries, which are in the reserve.
MOST_OFF = 0.12
# On CUDA, bytes that the allocator holds for every byte of the peak: free memory that no later shape fitted into. MLX
# keeps as much as its limit allows, by intention.
MOST_RESERVED = 1.25
SHARE_OF_DEVICE = 0.85  # of its memory that an estimate may take


def memory_checks(sizes: Sizes) -> list[DeviceCheck]:
    """Return a check for each shape, in a process of its own: memory that was used before does not all come back."""
    return [
        DeviceCheck(f"memory/{shape.name}", f"memory of {_described(shape)} beside its estimate",
                    partial(measure, shape), alone=True)
        for shape in sizes.memory
    ]  # fmt: skip


def _described(shape: TrainedShape) -> str:
    return shape.name if shape.quantization == "none" else f"{shape.name} in {shape.quantization}"


def measure(shape: TrainedShape, site: Site) -> CheckFinding:
    """Train on the micro-batches of a shape and compare the peak with the estimate."""
    expected = estimate(decoder_of(dict(shape.config)), ask_for(site, shape))
    total = site.backend.devices()[0].total_bytes
    if expected.total_bytes > SHARE_OF_DEVICE * total:
        needs, has = in_bytes(expected.total_bytes), in_bytes(total)
        return CheckFinding("skipped", f"it needs an estimated {needs}, and the device has {has}")
    before = site.backend.memory().used_bytes
    engine, batches = loaded_shape(site, shape)
    site.backend.reset_peak_memory()
    for batch in batches:
        train_on(site, engine, batch)
    memory = site.backend.memory()
    if memory.cached_bytes is None:
        return _of_tensors(site, engine, max(batches, key=lambda batch: batch.tokens_BT.size), expected)
    peak, arrays, is_cuda = memory.peak_bytes - before, _arrays(expected), site.device.kind == "cuda"
    reserve = expected[RESERVE] if is_cuda else 0
    reserved = memory.used_bytes + memory.cached_bytes
    figures = _off(peak, arrays, reserve) | {"reserved": reserved, "reserved_share": (reserved - reserve) / peak}
    tolerance = {"over": MOST_OFF, "under": MOST_OFF} | ({"reserved_share": MOST_RESERVED} if is_cuda else {})
    words = f"peak {in_bytes(peak)}, estimated {in_bytes(arrays)}{f' and {in_bytes(reserve)} of reserve' * is_cuda}; "
    words += f"the allocator holds {in_bytes(reserved)} after steps of different shapes"
    return CheckFinding(judged(figures, tolerance), words, figures, tolerance)


def _off(peak: int, arrays: int, reserve: int = 0) -> dict[str, float]:
    """Return the bytes, and by which share the peak is above and below the estimate."""
    off = {"over": (peak - reserve) / arrays - 1, "under": 1 - peak / arrays}
    return {"estimated": arrays, "reserve": reserve, "peak": peak, **off}


def _arrays(expected: Estimate) -> int:
    return expected.total_bytes - expected[RESERVE]


def _of_tensors(site: Site, engine: Engine, batch: Batch, expected: Estimate) -> CheckFinding:
    """Compare the tensors of one more step, where the backend's own counter is that of the process."""
    found = site.backend.profile(lambda: train_on(site, engine, batch), site.directory).peak_bytes
    if found is None:
        return CheckFinding("skipped", f"the backend {site.backend.name} does not count tensors here")
    arrays = _arrays(expected)
    figures = _off(found, arrays)
    tolerance = {"over": MOST_OFF, "under": MOST_OFF}
    words = f"tensors of {in_bytes(found)} at the peak, estimated {in_bytes(arrays)}"
    return CheckFinding(judged(figures, tolerance), words, figures, tolerance)
