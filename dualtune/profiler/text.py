"""The report on a series of snapshots as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualtune.profiler.analysis import SPIKE_MB, Leak, Spike, by_phase, find_leak, peak_of, spikes_in
from dualtune.profiler.snapshot import MB, Snapshot
from dualtune.text.show import in_columns, in_time

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
    for name, number in OTHER_NUMBERS.items():
        if values := [value for s in snapshots if (value := number(s)) is not None]:
            rows.append((name, f"{max(values) / MB:.1f} MB at most"))
    seconds, steps = last.timestamp - first.timestamp, len({s.step for s in snapshots})
    speed = f", {steps / seconds:.2f} steps/s" if seconds > 0 else ""
    return [*rows, ("duration", f"{in_time(seconds, 1)}{speed}")]


OTHER_NUMBERS: dict[str, Callable[[Snapshot], int | None]] = {
    "cached": lambda snapshot: snapshot.cached_bytes,
    "process": lambda snapshot: snapshot.process_bytes,
    "device": lambda snapshot: snapshot.device_bytes,
}


def _phases(snapshots: Sequence[Snapshot]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("phase", "snapshots", "mean MB", "max MB", "min MB")]
    for phase, found in by_phase(snapshots).items():
        numbers = (found.mean_bytes, found.max_bytes, found.min_bytes)
        rows.append((phase, str(found.num_snapshots), *(f"{number / MB:.1f}" for number in numbers)))
    return rows


def _spikes(found: Sequence[Spike], threshold_mb: float) -> list[str]:
    lines = [f"spikes over {threshold_mb:g} MB: {len(found) or 'none'}"]
    lines += [f"  step {spike.step}, {spike.phase}: +{spike.delta_mb:.1f} MB" for spike in found[:SHOWN_SPIKES]]
    return lines + [f"  … and {len(found) - SHOWN_SPIKES} more"] * (len(found) > SHOWN_SPIKES)


def leak_lines(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return the verdict on the memory in use, and on that of the process, where it is counted apart."""
    lines = [f"leak: {_verdict(find_leak(snapshots))}"]
    in_process = find_leak(snapshots, lambda snapshot: snapshot.process_bytes)
    return lines + [f"leak in the process: {_verdict(in_process)}"] * (in_process is not None)


def _verdict(leak: Leak | None) -> str:
    if leak is None:
        return "not judged: fewer than 50 steps"
    numbers = f"{leak.slope / 1024:+.2f} ± {leak.bound / 1024:.2f} KiB per step"
    return f"found: {numbers}, {leak.growth_bytes / MB:.1f} MB so far" if leak.found else f"none ({numbers})"
