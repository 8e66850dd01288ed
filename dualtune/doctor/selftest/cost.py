"""Checks of what training costs on a device: products of matrices, memory, speed, and waits of the host."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from dualtune.base.checks import Check
from dualtune.base.errors import EnvironmentFault
from dualtune.base.text import in_bytes
from dualtune.data.batches import SequenceLayout, step_documents
from dualtune.doctor.bench.measure import peak_flops
from dualtune.doctor.selftest.case import (
    DeviceCheck,
    Site,
    Sizes,
    TrainedShape,
    ask_for,
    compared_batches,
    judged,
    loaded_shape,
    request_for,
    train_on,
    written_model,
)
from dualtune.engine.detect import detect
from dualtune.engine.machines import published
from dualtune.engine.memory.estimate import Estimate, estimate
from dualtune.engine.memory.shapes import decoder_of
from dualtune.engine.step_time import predict
from dualtune.train.memory import RESERVE

# ----------------------------------------------------------------------------------------------------------------------
# The device itself: that it is there, and how fast it multiplies matrices.


def device_check() -> DeviceCheck:
    """Return the check that comes first: without a device, none of the others says anything."""
    return DeviceCheck("device", "the device multiplies matrices", multiply)


def multiply(site: Site) -> Check:
    """Measure the product of two large matrices in the dtypes that the other checks use."""
    devices = site.backend.devices()
    dtypes = dict.fromkeys((site.device.auto_dtype, "float32"))
    speeds = {dtype: peak_flops(site.backend, dtype) for dtype in dtypes}
    rates = ", ".join(f"{speed / 1e12:.2f} TFLOP/s in {dtype}" for dtype, speed in speeds.items())
    text = f"{devices[0].name or 'a processor'} ({devices[0].kind}): {rates}"
    figures = {"devices": [asdict(device) for device in devices], "flops_per_s": speeds}
    return Check("device", "ok", text, figures=figures)


# ----------------------------------------------------------------------------------------------------------------------
# The memory of training steps: the estimate beside the peak, and what the allocator keeps beyond it.

# The peak may be this share above or below the estimate of all arrays. On CPUs the tests allow as much for steps that
# are not compiled. CUDA's allocator also counts workspaces of libraries, which are in the reserve.
MOST_OFF = 0.12
OFF_LIMITS = {"over": MOST_OFF, "under": MOST_OFF}
# On CUDA, bytes that the allocator holds for every byte of the peak: free memory that no later shape fitted into. MLX
# keeps as much as its limit allows, by intention.
MOST_RESERVED = 1.25
SHARE_OF_DEVICE = 0.85  # of its memory that an estimate may take


def memory_checks(sizes: Sizes) -> list[DeviceCheck]:
    """Return a check for each shape, in a process of its own: memory that was used before does not all come back."""
    return [
        DeviceCheck(_memory_check(shape), f"memory of {_described(shape)} beside its estimate",
                    partial(measure_memory, shape), alone=True)
        for shape in sizes.memory
    ]  # fmt: skip


def _memory_check(shape: TrainedShape) -> str:
    return f"memory/{shape.name}"


def _described(shape: TrainedShape) -> str:
    return shape.name if shape.quantization == "none" else f"{shape.name} in {shape.quantization}"


def measure_memory(shape: TrainedShape, site: Site) -> Check:
    """Train on the micro-batches of a shape and compare the peak with the estimate."""
    expected = estimate(decoder_of(dict(shape.config)), ask_for(site, shape))
    total = site.backend.devices()[0].total_bytes
    if expected.total_bytes > SHARE_OF_DEVICE * total:
        needs, has = in_bytes(expected.total_bytes), in_bytes(total)
        return Check(_memory_check(shape), "skipped", f"it needs an estimated {needs}, and the device has {has}")
    before = site.backend.memory().used_bytes
    engine, batches = loaded_shape(site, shape)
    site.backend.reset_peak_memory()
    for batch in batches:
        train_on(site, engine, batch)
    memory = site.backend.memory()
    if memory.cached_bytes is None:
        largest = max(batches, key=lambda batch: batch.tokens_BT.size)
        return _measure_tensors(shape, site, lambda: train_on(site, engine, largest), expected)
    peak, arrays, is_cuda = memory.peak_bytes - before, _arrays(expected), site.device.kind == "cuda"
    reserve = expected[RESERVE] if is_cuda else 0
    reserved = memory.used_bytes + memory.cached_bytes
    figures = _off(peak, arrays, reserve) | {"reserved": reserved, "reserved_share": (reserved - reserve) / peak}
    limits = OFF_LIMITS | ({"reserved_share": MOST_RESERVED} if is_cuda else {})
    text = f"peak {in_bytes(peak)}, estimated {in_bytes(arrays)}{f' and {in_bytes(reserve)} of reserve' * is_cuda}; "
    text += f"the allocator holds {in_bytes(reserved)} after steps of different shapes"
    return judged(_memory_check(shape), text, figures, limits)


def _off(peak: int, arrays: int, reserve: int = 0) -> dict[str, float]:
    """Return the bytes, and by which share the peak is above and below the estimate."""
    off = {"over": (peak - reserve) / arrays - 1, "under": 1 - peak / arrays}
    return {"estimated": arrays, "reserve": reserve, "peak": peak, **off}


def _arrays(expected: Estimate) -> int:
    return expected.total_bytes - expected[RESERVE]


def _measure_tensors(shape: TrainedShape, site: Site, step: Callable[[], object], expected: Estimate) -> Check:
    """Compare the tensors of one more step, where the backend's own counter is that of the process."""
    name, peak = _memory_check(shape), site.backend.profile(step, site.directory).peak_bytes
    if peak is None:
        return Check(name, "skipped", f"the backend {site.backend.name} does not count tensors here")
    arrays = _arrays(expected)
    text = f"tensors of {in_bytes(peak)} at the peak, estimated {in_bytes(arrays)}"
    return judged(name, text, _off(peak, arrays), OFF_LIMITS)


# ----------------------------------------------------------------------------------------------------------------------
# The predicted speed of a shape on a device: the one place where the performance model is asked.


def predicted_tokens_per_s(site: Site, shape: TrainedShape) -> float | None:
    """Return the tokens per second that are predicted for training a shape of one micro-batch here.

    None: there is no formula, or no published limits of this machine; a CPU has none.
    """
    limits = None if site.device.kind == "cpu" else published(detect())
    if limits is None:
        return None
    (lengths,) = shape.lengths
    documents = step_documents(np.array(lengths), SequenceLayout(sum(lengths), sum(lengths)), "the self-test")
    try:
        return predict(decoder_of(dict(shape.config)), ask_for(site, shape), documents, limits).tokens_per_s
    except EnvironmentFault:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Tokens per second of a short training, beside what was predicted. The speed is reported, and never a failure.

WARMUP = 3  # the first step compiles, the second records, the third is the first of its kind


def speed_check() -> DeviceCheck:
    """Return the measurement of the speed, in a process of its own."""
    return DeviceCheck("speed", "tokens per second of a short training", measure_speed, alone=True)


def measure_speed(site: Site) -> Check:
    """Train on the same micro-batch, as often as the sizes say."""
    shape, steps = site.sizes.speed, site.sizes.speed_steps
    engine, (batch,) = loaded_shape(site, shape)
    losses = [train_on(site, engine, batch) for _ in range(WARMUP)]
    step_s: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(train_on(site, engine, batch))
        step_s.append(time.perf_counter() - start)
    if not all(map(math.isfinite, losses)):
        return Check("speed", "fail", "a loss is not finite", figures={"losses": [str(loss) for loss in losses]})
    rate = batch.num_tokens * steps / sum(step_s)
    predicted = predicted_tokens_per_s(site, shape)
    figures = {
        "tokens_per_s": rate,
        "predicted_tokens_per_s": predicted,
        "step_s": step_s,
        "model": shape.name,
        "tokens": batch.num_tokens,
        "dtype": engine.description.dtype,
        "kernels": engine.description.kernels,
    }
    beside = "no prediction" if predicted is None else f"{rate / predicted:.0%} of the predicted {predicted:,.0f}"
    text = f"{shape.name}, {batch.num_tokens} tokens a step: {rate:,.0f} tokens/s; {beside}"
    return Check("speed", "ok", text, figures=figures)


# ----------------------------------------------------------------------------------------------------------------------
# Waits of the host for the device in a training step, which should only send work.

WAITS_WARMUP, STEPS = 2, 3  # the first steps compile, and fill caches


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


def count(quantization: str, site: Site) -> Check:
    """Count the waits of training steps, from the arrays of a micro-batch to the queued update."""
    name = f"waits/{quantization}"
    if not isinstance(site.backend, CountsWaits):
        return Check(name, "skipped", f"the framework of the backend {site.backend.name} does not say when it waits")
    counted = site.backend.counted_waits()
    if isinstance(counted, str):
        return Check(name, "skipped", counted)
    pieces = frozenset((*site.card.pieces, *site.device.pieces))
    engine = site.backend.load(request_for(written_model(site, "llama"), "auto", quantization, 0.1, pieces=pieces))
    batches = compared_batches(site)

    def step() -> None:
        for batch in batches:
            engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-4, max_grad_norm=1.0)

    for _ in range(WAITS_WARMUP):
        step()
    site.backend.synchronize()
    with counted as waits:
        for _ in range(STEPS):
            step()
    places = Counter(waits)
    most = "; ".join(f"{number} at {place}" for place, number in places.most_common(8)) or "none"
    return judged(name, f"waits in {STEPS} steps: {most}", {"waits": len(waits)}, {"waits": 0})
