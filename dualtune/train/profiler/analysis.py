"""What a series of snapshots means: its peak, the use by phase, spikes, and whether memory leaks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

from dualtune.base.text import in_bytes, in_columns, in_time
from dualtune.train.profiler.snapshot import GB, MB, Snapshot

RESERVE = "reserve"  # the part of a plan outside of arrays

SPIKE_MB = 100.0
NUM_BLOCKS = 10
MIN_STEPS = 40  # of which a leak can be found: four in each block
WARM_UP = 0.2  # the share of a series in which caches and compiled code still grow
STUDENT_T = 4.501  # with 8 degrees of freedom, exceeded with a probability of 0.1 %: Student's table
MIN_GROWTH = 0.01  # of the memory in use; a smaller growth is not a leak that matters


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest use, and the phase in which it was reached."""

    bytes: int
    step: int
    phase: str

    @property
    def mb(self) -> float:
        return self.bytes / MB

    @property
    def gb(self) -> float:
        return self.bytes / GB


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The memory in use at the snapshots of one phase."""

    num_snapshots: int
    mean_bytes: float
    max_bytes: int
    min_bytes: int


class Spike(NamedTuple):
    """An increase from one snapshot to the next."""

    step: int
    delta_mb: float
    phase: str


@dataclass(frozen=True, slots=True)
class Leak:
    """The growth of the memory that is never freed, in bytes per step; the true growth lies within ± `bound`."""

    slope: float
    bound: float
    growth_bytes: float  # over the steps that were judged
    found: bool


def peak_of(snapshots: Sequence[Snapshot]) -> Peak | None:
    """Return the first snapshot with the highest use; None without snapshots.

    With counters of the peak it is exact: the counter first shows its highest value in the phase that reached it.
    """
    if not snapshots:
        return None
    at = max(snapshots, key=_highest)
    return Peak(_highest(at), at.step, at.phase)


@dataclass(frozen=True, slots=True)
class AgainstPlan:
    """A memory plan beside the part of the peak that it plans."""

    planned_bytes: int
    measured_bytes: int
    what: str  # is measured
    mapped_bytes: int = 0  # in the peak of the process, and in no plan

    def __str__(self) -> str:
        deviation = 100 * (self.planned_bytes / self.measured_bytes - 1)
        beside = f"; mapped files: {in_bytes(self.mapped_bytes)}" if self.mapped_bytes else ""
        return (
            f"plan: {in_bytes(self.planned_bytes)}, measured peak of {self.what}: {in_bytes(self.measured_bytes)} "
            f"(plan {deviation:+.1f} %){beside}"
        )


def against_plan(snapshots: Sequence[Snapshot], recorded: Mapping[str, Any]) -> AgainstPlan | None:
    """Compare the peak with the plan in `recorded`, the entry "memory" of environment.json; None without a plan.

    An allocator counts its arrays, so the plan's reserve is left out. A process has mapped files besides, which no plan
    has: the weights are read from them, and the system may take their memory back.
    """
    planned = recorded.get("planned_bytes")
    if type(planned) is not int or planned <= 0 or not snapshots:
        return None
    at = max(snapshots, key=_highest)
    if at.cached_bytes is not None:
        comparison = AgainstPlan(planned - _reserve(recorded.get("parts")), _highest(at), "arrays")
    elif at.process_bytes is not None:
        mapped = max(0, at.used_bytes - at.process_bytes)
        comparison = AgainstPlan(planned, _highest(at) - mapped, "memory without mapped files", mapped)
    else:
        comparison = AgainstPlan(planned, _highest(at), "memory")
    return comparison if comparison.measured_bytes > 0 and comparison.planned_bytes > 0 else None


def _reserve(parts: object) -> int:
    """Return the bytes of a plan outside of arrays, from a file that may hold anything."""
    listed = cast("list[Any]", parts) if isinstance(parts, list) else []
    tables = [cast("dict[str, Any]", part) for part in listed if isinstance(part, dict)]
    return next((p["bytes"] for p in tables if p.get("name") == RESERVE and type(p.get("bytes")) is int), 0)


def _highest(snapshot: Snapshot) -> int:
    return snapshot.used_bytes if snapshot.peak_bytes is None else max(snapshot.used_bytes, snapshot.peak_bytes)


def by_phase(snapshots: Sequence[Snapshot]) -> dict[str, PhaseMemory]:
    """Return mean, maximum and minimum for each phase, in the order in which the phases first occur."""
    used: dict[str, list[int]] = {}
    for snapshot in snapshots:
        used.setdefault(snapshot.phase, []).append(snapshot.used_bytes)
    return {phase: PhaseMemory(len(all_), statistics.fmean(all_), max(all_), min(all_)) for phase, all_ in used.items()}


def spikes_in(snapshots: Sequence[Snapshot], threshold_mb: float = SPIKE_MB) -> list[Spike]:
    """Return the snapshots with more than `threshold_mb` more in use than at the one before, in order of time."""
    increases = (
        Spike(now.step, (now.used_bytes - before.used_bytes) / MB, now.phase) for before, now in pairwise(snapshots)
    )
    return [spike for spike in increases if spike.delta_mb > threshold_mb]


Counter = Literal["used_bytes", "cached_bytes", "process_bytes", "device_bytes"]  # a number of a snapshot


def find_leak(snapshots: Sequence[Snapshot], counter: Counter = "used_bytes") -> Leak | None:
    """Judge whether the memory that is in use even at the lowest point of each step grows without end.

    The statistic: the first fifth of the steps is left out as warm-up, the rest is divided into ten blocks of equal
    length, and the median of each block is its level. The nine increases from level to level have the mean d and the
    standard error s = sd / sqrt(9). The slope per step is d / length, known within ± t·s / length, where t is
    Student's for 8 degrees of freedom. It is a leak if the slope is above that bound, and if the level has grown by at
    least 1 %. So one jump (a longer document, a cache that fills once) is none: it is a large d with an s just as
    large; nor is a random walk, whose increases have the mean zero. None with fewer than 40 steps after the warm-up.
    """
    lowest: dict[int, int] = {}  # by step
    for snapshot in snapshots:
        if (value := getattr(snapshot, counter)) is not None:
            lowest[snapshot.step] = min(value, lowest.get(snapshot.step, value))
    floors = [lowest[step] for step in sorted(lowest)]
    first = math.ceil(len(floors) * WARM_UP)
    length = (len(floors) - first) // NUM_BLOCKS
    if length * NUM_BLOCKS < MIN_STEPS:
        return None
    recent = floors[len(floors) - length * NUM_BLOCKS :]
    blocks = [statistics.median(recent[i : i + length]) for i in range(0, len(recent), length)]
    increases = [after - before for before, after in pairwise(blocks)]
    slope = statistics.fmean(increases) / length
    bound = STUDENT_T * statistics.stdev(increases) / math.sqrt(len(increases)) / length
    growth = blocks[-1] - blocks[0]
    return Leak(slope, bound, growth, found=slope > bound and growth >= MIN_GROWTH * blocks[0])


# ----------------------------------------------------------------------------------------------------------------------
# The report on a series of snapshots as text.

EMPTY = "No memory snapshots recorded"
SHOWN_SPIKES = 10


def report(snapshots: Sequence[Snapshot], threshold_mb: float = SPIKE_MB) -> str:
    """Return peak, use by phase, spikes and the verdict on leaks, in MB of 2**20 bytes."""
    if not snapshots:
        return EMPTY
    parts = [
        in_columns(_overall(snapshots)),
        in_columns(_phases(snapshots)),
        "\n".join(_spikes(spikes_in(snapshots, threshold_mb), threshold_mb)),
        "\n".join(leak_lines(snapshots)),
    ]
    return "\n\n".join(["Memory profile", *parts])


def _overall(snapshots: Sequence[Snapshot]) -> list[tuple[str, str]]:
    peak, first, last = peak_of(snapshots), snapshots[0], snapshots[-1]
    assert peak is not None
    rows = [
        ("peak", f"{peak.mb:.1f} MB at step {peak.step}, {peak.phase}"),
        ("initial", f"{first.used_mb:.1f} MB"),
        ("final", f"{last.used_mb:.1f} MB"),
        ("capacity", f"{last.total_bytes / MB:.1f} MB"),
        ("utilization", f"{100 * peak.bytes / last.total_bytes if last.total_bytes else 0:.1f} % at the peak"),
    ]
    for name in ("cached", "process", "device"):
        if values := [value for s in snapshots if (value := getattr(s, f"{name}_bytes")) is not None]:
            rows.append((name, f"{max(values) / MB:.1f} MB at most"))
    seconds, steps = last.timestamp - first.timestamp, len({s.step for s in snapshots})
    speed = f", {steps / seconds:.2f} steps/s" if seconds > 0 else ""
    return [*rows, ("duration", f"{in_time(seconds, 1)}{speed}")]


def _phases(snapshots: Sequence[Snapshot]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("phase", "snapshots", "mean MB", "max MB", "min MB")]
    for phase, use in by_phase(snapshots).items():
        numbers = (use.mean_bytes, use.max_bytes, use.min_bytes)
        rows.append((phase, str(use.num_snapshots), *(f"{number / MB:.1f}" for number in numbers)))
    return rows


def _spikes(spikes: Sequence[Spike], threshold_mb: float) -> list[str]:
    lines = [f"spikes over {threshold_mb:g} MB: {len(spikes) or 'none'}"]
    lines += [f"  step {spike.step}, {spike.phase}: +{spike.delta_mb:.1f} MB" for spike in spikes[:SHOWN_SPIKES]]
    return lines + [f"  … and {len(spikes) - SHOWN_SPIKES} more"] * (len(spikes) > SHOWN_SPIKES)


def leak_lines(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return the verdict on the memory in use, and on that of the process, where it is counted apart."""
    lines = [f"leak: {_verdict(find_leak(snapshots))}"]
    in_process = find_leak(snapshots, "process_bytes")
    return lines + [f"leak in the process: {_verdict(in_process)}"] * (in_process is not None)


def _verdict(leak: Leak | None) -> str:
    if leak is None:
        return "not judged: fewer than 50 steps"
    numbers = f"{leak.slope / 1024:+.2f} ± {leak.bound / 1024:.2f} KiB per step"
    return f"found: {numbers}, {leak.growth_bytes / MB:.1f} MB so far" if leak.found else f"none ({numbers})"
