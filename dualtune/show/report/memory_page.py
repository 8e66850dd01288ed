"""The page of `dualtune profile --html`: the memory of a run over its steps as a plot, and the report as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualtune.show.report.page import as_text, whole_page
from dualtune.train.profiler.snapshot import MB, Snapshot

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 320, 80, 30, 10  # of the plot, in units of the SVG
MAX_POINTS = 600  # more snapshots are drawn in groups
STYLE = """
:root { color-scheme: light dark; --text: #1d2127; --dim: #59616c; --page: #f6f7f9; --card: #fff; --line: #d9dde3;
  --used: #1d5fbf; --peak: #b3261e; --process: #2f7d4a; --device: #7d5c00 }
@media (prefers-color-scheme: dark) { :root { --text: #e7e9ec; --dim: #a3abb6; --page: #121417; --card: #1b1e23;
  --line: #363c45; --used: #8ab8ff; --peak: #ff9d95; --process: #5cb87a; --device: #e0bb4a } }
body { margin: 0; color: var(--text); background: var(--page); font: 1rem/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere }
svg { display: block; width: 100%; border: 1px solid var(--line); border-radius: .5rem; background: var(--card) }
svg text { fill: var(--dim); font-size: 12px }
svg .grid { stroke: var(--line) }
polyline { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke }
.used { stroke: var(--used); color: var(--used) } .peak { stroke: var(--peak); color: var(--peak) }
.process { stroke: var(--process); color: var(--process) } .device { stroke: var(--device); color: var(--device) }
.peak, .device { stroke-dasharray: 5 3 }
ul { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; padding: 0; list-style: none }
pre { overflow-x: auto; padding: 1rem; border: 1px solid var(--line); border-radius: .5rem; background: var(--card) }
"""
# The lines: class of the style, what it is, and where the number comes from.
LINES: Sequence[tuple[str, str, Callable[[Snapshot], int | None]]] = (
    ("used", "in use at the end of a phase", lambda s: s.used_bytes),
    ("peak", "peak so far", lambda s: s.peak_bytes),
    ("process", "of the process", lambda s: s.process_bytes),
    ("device", "of the whole device", lambda s: s.device_bytes),
)


def memory_page(title: str, snapshots: Sequence[Snapshot], report: str) -> str:
    """Return the whole page; without snapshots it has only the report."""
    plot = _plot(snapshots) if snapshots else ""
    return whole_page(title, STYLE, f"{plot}<h2>Report</h2>\n<pre>{as_text(report)}</pre>\n")


def _plot(snapshots: Sequence[Snapshot]) -> str:
    lines = [(kind, what, _grouped(snapshots, number)) for kind, what, number in LINES]
    lines = [(kind, what, points) for kind, what, points in lines if points]
    highest = max(value for _, _, points in lines for _, value in points)
    legend = "".join(f'<li class="{kind}">■ {what}</li>\n' for kind, what, _ in lines)
    drawn = "".join(
        f'<polyline class="{kind}" points="{_coordinates(points, len(snapshots), highest)}"/>\n'
        for kind, _, points in lines
    )
    axes = "".join(_grid(highest * part / 4, highest) for part in range(5))
    last = snapshots[-1].step
    return (
        f"<ul>\n{legend}</ul>\n"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Memory in MB over the steps of the run">\n'
        f'{axes}{drawn}<text x="{LEFT}" y="{HEIGHT - 8}">step {snapshots[0].step}</text>'
        f'<text x="{WIDTH - 5}" y="{HEIGHT - 8}" text-anchor="end">step {last}</text>\n</svg>\n'
    )


def _grouped(snapshots: Sequence[Snapshot], number: Callable[[Snapshot], int | None]) -> list[tuple[int, int]]:
    """Return (index, bytes): of each group of neighbours the lowest and the highest, in their order."""
    known = [(index, value) for index, s in enumerate(snapshots) if (value := number(s)) is not None]
    size = -(-2 * len(known) // MAX_POINTS)
    if size < 3:
        return known
    groups = (known[i : i + size] for i in range(0, len(known), size))
    return [
        point
        for group in groups
        for point in sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    ]  # fmt: skip


def _coordinates(points: Sequence[tuple[int, int]], count: int, highest: int) -> str:
    across = (WIDTH - LEFT - 5) / max(count - 1, 1)
    return " ".join(f"{LEFT + index * across:.1f},{_height(value, highest):.1f}" for index, value in points)


def _height(value: float, highest: int) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / max(highest, 1))


def _grid(value: float, highest: int) -> str:
    y = _height(value, highest)
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 5}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value / MB:,.0f} MB</text>\n'
    )
