"""The page of `dualtune profile --html`: the memory of a run over its steps as a plot, and the report as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dualtune.show.report.page import asset, make_page
from dualtune.train.profiler.snapshot import MB, Snapshot

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 320, 80, 30, 10  # of the plot, in units of the SVG
MAX_POINTS = 600  # more snapshots are drawn in groups
# The lines: class of the style, what it is, and where the number comes from.
LINES: Sequence[tuple[str, str, Callable[[Snapshot], int | None]]] = (
    ("used", "in use at the end of a phase", lambda s: s.used_bytes),
    ("peak", "peak so far", lambda s: s.peak_bytes),
    ("process", "of the process", lambda s: s.process_bytes),
    ("device", "of the whole device", lambda s: s.device_bytes),
)


def memory_page(title: str, snapshots: Sequence[Snapshot], report: str) -> str:
    """Return the whole page; without snapshots it has only the report."""
    plot = _plot(snapshots) if snapshots else None
    return make_page("memory.html", title, style=asset("memory.css"), plot=plot, report=report)


def _plot(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    grouped = [(kind, text, _grouped(snapshots, number)) for kind, text, number in LINES]
    highest = max(value for _, _, points in grouped for _, value in points)
    across = (WIDTH - LEFT - 5) / max(len(snapshots) - 1, 1)

    def height(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / max(highest, 1))

    return {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "first": snapshots[0].step, "last": snapshots[-1].step,
        "lines": [
            (kind, text, [(LEFT + index * across, height(value)) for index, value in points])
            for kind, text, points in grouped
            if points
        ],
        "grid": [(height(highest * part / 4), f"{highest * part / 4 / MB:,.0f} MB") for part in range(5)],
    }  # fmt: skip


def _grouped(snapshots: Sequence[Snapshot], number: Callable[[Snapshot], int | None]) -> list[tuple[int, int]]:
    """Return (index, bytes): of each group of neighbours the lowest and the highest, in their order."""
    points = [(index, value) for index, s in enumerate(snapshots) if (value := number(s)) is not None]
    size = -(-2 * len(points) // MAX_POINTS)
    if size < 3:
        return points
    groups = (points[i : i + size] for i in range(0, len(points), size))
    return [
        point
        for group in groups
        for point in sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    ]  # fmt: skip
