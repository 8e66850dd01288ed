"""A comparison as a table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from xml.sax.saxutils import escape

from dualtune.bench.hybrid.arms import BASELINE
from dualtune.bench.hybrid.compare import ArmResult, Comparison
from dualtune.bench.intervals import Interval

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 70, 20, 20, 50  # of the plot, in units of the SVG
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")  # Okabe and Ito's, and gray
HEAD = ("arm", "cost", "loss", "perplexity", "control", "perplexity against control", "time", "predictions", "verdict")
LEGEND = (
    ("cost", "of the baseline's, in steps; a probe counts by its tokens, a frozen step as a forward pass"),
    ("control", "the loss of a baseline whose whole schedule has as many steps as the arm's cost buys"),
    ("against control", "paired over the seeds, with a 95 % interval (Student's t)"),
    ("time", "in steps, by the clock, in times of the baseline's; as steady as the machine"),
    ("predictions", "accepted of attempted, and undone after their check, over all seeds"),
)


def lines(found: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table as text, the header first."""
    yield HEAD
    for result in found.results:
        counts, is_baseline = result.counts, result.arm.name == BASELINE
        told = f"{counts['accepted']} of {counts['attempts']}, {counts['undone']} undone" if counts else ""
        yield (
            result.arm.name,
            f"{result.cost:.3f}",
            f"{fmean(result.losses):.4f}",
            f"{result.perplexity:.3f}",
            "" if is_baseline else f"{fmean(trial.eval_loss for trial in result.controls):.4f}",
            "" if is_baseline else in_percent(result.against_control),
            "" if is_baseline else f"{result.wall.mean:.2f}",
            told,
            result.verdict,
        )


def in_percent(losses: Interval) -> str:
    """Return a difference of losses as one of perplexities: exp(d) − 1, with the ends of its interval."""
    low_to_high = [losses.mean] if losses.margin is None else [losses.mean - losses.margin, losses.mean + losses.margin]
    ends = [f"{100 * math.expm1(end):+.2f}" for end in low_to_high]
    mean = f"{100 * math.expm1(losses.mean):+.2f} %"
    return mean if losses.margin is None else f"{mean} ({ends[0]} to {ends[1]})"


def plot(found: Comparison) -> str:
    """Return an SVG: loss over cost, the arms as points on top of the line of the baseline and the controls."""
    return _Plot(found).svg()


class _Plot:
    def __init__(self, found: Comparison) -> None:
        self._results = found.results
        self._line = sorted(self._control_points())
        points = self._line + [(result.cost, fmean(result.losses)) for result in found.results]
        self._x, self._y = _range([x for x, _ in points]), _range([y for _, y in points])

    def svg(self) -> str:
        line = " ".join(f"{self._at_x(x):.1f},{self._at_y(y):.1f}" for x, y in self._line)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-label="Evaluation loss over cost, arms beside the baseline" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *self._axes(),
            f'<polyline points="{line}" fill="none" stroke="#444444" stroke-dasharray="4 3"/>',
            *(part for i, result in enumerate(self._results) for part in self._point(result, COLORS[i % len(COLORS)])),
            "</svg>\n",
        ]
        return "\n".join(parts)

    def _control_points(self) -> set[tuple[float, float]]:
        """Return (cost, mean loss) of the controls; that of the baseline is itself."""
        return {
            (
                fmean(own.cost / base.cost for own, base in zip(result.controls, result.baseline, strict=True)),
                fmean(trial.eval_loss for trial in result.controls),
            )
            for result in self._results
        }

    def _axes(self) -> Iterator[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for i in range(5):
            x, y = (low + i * (high - low) / 4 for low, high in (self._x, self._y))
            at_x, at_y = self._at_x(x), self._at_y(y)
            yield f'<line x1="{LEFT}" x2="{right}" y1="{at_y:.1f}" y2="{at_y:.1f}" stroke="#dddddd"/>'
            yield f'<text x="{LEFT - 6}" y="{at_y + 4:.1f}" text-anchor="end">{y:.3f}</text>'
            yield f'<text x="{at_x:.1f}" y="{bottom + 16}" text-anchor="middle">{x:.2f}</text>'
        yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">cost, of the baseline</text>'
        yield f'<text x="{LEFT}" y="{TOP - 6}">evaluation loss (dashed: the baseline with fewer steps)</text>'

    def _point(self, result: ArmResult, color: str) -> Iterator[str]:
        x, y, margin = self._at_x(result.cost), fmean(result.losses), result.against_control.margin
        if margin is not None:
            ends = (self._at_y(min(max(end, self._y[0]), self._y[1])) for end in (y - margin, y + margin))
            low, high = ends
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{color}"/>'
        yield f'<circle cx="{x:.1f}" cy="{self._at_y(y):.1f}" r="4" fill="{color}"/>'
        anchor = "end" if x > WIDTH / 2 else "start"
        x += -8 if anchor == "end" else 8
        place = f'x="{x:.1f}" y="{self._at_y(y) + 4:.1f}" text-anchor="{anchor}"'
        yield f'<text {place} fill="{color}">{escape(result.arm.name)}</text>'

    def _at_x(self, value: float) -> float:
        low, high = self._x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def _at_y(self, value: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _range(values: list[float]) -> tuple[float, float]:
    """Return the ends of an axis: those of the values, and a tenth more on both sides."""
    low, high = min(values), max(values)
    room = (high - low) / 10 or abs(high) / 100 or 1.0
    return low - room, high + room
