"""The table and the plot of the results of peers.py: results/peers.md and results/peers.svg."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from origins import with_origins

SAME_LOSS = 1e-2  # the largest relative gap between the losses of a step of two sides that train the same
GIB = 2**30
HEAD = (
    "| peer | settings | dualtune tokens/s | peer tokens/s | ratio (lowest–highest) | target tokens/s | "
    "utilisation | peak memory, GiB | ratio | first step, s | worst loss gap |"
)
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's
WIDTH, HEIGHT, MARGIN = 420, 220, 60


def write(parts: dict[str, Any], results: Path) -> None:
    """Beside the .json."""
    results.with_suffix(".md").write_text(with_origins(table(parts), results.stem), encoding="utf-8")
    results.with_suffix(".svg").write_text(plot(parts), encoding="utf-8")


def grouped(parts: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str, dict[str, Any]]]]]:
    """(platform/shape/workload, [(peer, part, figures)])."""
    for place, keys in groupby(sorted(parts), key=lambda key: key.rsplit("/", 2)[0]):
        yield place, [(*key.rsplit("/", 2)[1:], parts[key]) for key in keys]  # type: ignore[misc]


# --- table ---


def table(parts: dict[str, Any]) -> str:
    """Medians of the pairs; where two figures stand together, dualtune's comes first."""
    lines = [
        "Made by benchmarks/peers.py. Medians of interleaved pairs; of two figures dualtune's is the first.",
        "Utilisation: the operations of the model for the tokens of the documents, as a share of what a large matrix",
        "product reaches beside each run (`training_flops` in dualtune/doctor/bench/measure.py has the formula).",
    ]
    for place, rows in grouped(parts):
        lines += ["", f"### {place}", "", HEAD, "|---" * HEAD.count(" | ") + "|---|"]
        lines += [row(peer, part, figures) for peer, part, figures in rows]
        lines += [f"\n{note}" for peer, _, figures in rows if (note := note_of(peer, figures))]
    return "\n".join(lines) + "\n"


def row(peer: str, part: str, figures: dict[str, Any]) -> str:
    if "not_run" in figures:
        reason = figures["not_run"].replace("|", "\\|")
        return f"| {peer} | {part} | not run: {reason} |" + " |" * 8
    speed, memory = figures["tokens_per_s"], figures["peak_bytes"]
    ratio, gap = speed["ratio"], figures["worst_loss_gap"]
    compared = f"{gap:.1e}" if part != "dropout" else "–"  # they need not agree
    cells = [
        peer, part, f"{median(speed['ours']):.0f}", f"{median(speed['theirs']):.0f}",
        f"**{ratio['median']:.2f}** ({ratio['lowest']:.2f}–{ratio['highest']:.2f})",
        both(figures["target_tokens_per_s"], 1, ".0f"),
        both(figures["utilisation"], 1, ".0%") if "utilisation" in figures else "–", both(memory, GIB, ".2f"),
        f"{memory['ratio']['median']:.2f}" if memory["ratio"] else "–",
        both(figures["first_step_s"], 1, ".1f"), compared,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def note_of(peer: str, figures: dict[str, Any]) -> str:
    """Where the peer does not train the same."""
    notes: list[str] = []
    if extra := figures.get("targets_counted_beyond_the_documents"):
        notes.append(f"divides by {extra:g} target tokens a step more than the documents have")
    if not figures.get("losses_agree", True):
        notes.append(f"losses differ by up to {figures['worst_loss_gap']:.1%}")
    return f"{peer} {', '.join(notes)}." if notes and peer != "dualtune" else ""


def both(figure: dict[str, Any], unit: float, form: str) -> str:
    return f"{median(figure['ours']) / unit:{form}} / {median(figure['theirs']) / unit:{form}}"


# --- plot ---


def plot(parts: dict[str, Any]) -> str:
    """A row for each platform/shape/workload: the losses of the peers at their best, and the speeds of all."""
    panels: list[str] = []
    top = MARGIN
    for place, rows in grouped(parts):
        ran = [(peer, part, figures) for peer, part, figures in rows if "not_run" not in figures and part != "dropout"]
        if ran:
            panels += [text(MARGIN, top - 30, place, "font-weight='bold'"), *curves(ran, top), *bars(ran, top)]
            top += HEIGHT + 2 * MARGIN
    width, height = 2 * WIDTH + 4 * MARGIN, top
    size = f"width='{width}' height='{height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='12'>"
    return "\n".join([head, f"<rect {size} fill='white'/>", *panels, "</svg>\n"])


def curves(rows: list[tuple[str, str, dict[str, Any]]], top: int) -> list[str]:
    """The loss of each step: of the longest run of dualtune, and of every peer."""
    best = [figures["losses"] for _, part, figures in rows if part == "best"] or [rows[0][2]["losses"]]
    lines: dict[str, list[float]] = {}
    for losses in best:
        for side, values in losses.items():
            lines[side] = max(lines.get(side, []), values, key=len)
    low, high = min(map(min, lines.values())), max(map(max, lines.values()))
    steps = max(map(len, lines.values()))
    drawn = [frame(MARGIN, top, "loss of each step"), text(MARGIN - 5, top + 10, f"{high:.2f}", "text-anchor='end'")]
    drawn.append(text(MARGIN - 5, top + HEIGHT, f"{low:.2f}", "text-anchor='end'"))
    for number, (side, values) in enumerate(lines.items()):
        points = " ".join(
            f"{MARGIN + WIDTH * i / max(steps - 1, 1):.1f},{top + HEIGHT * (high - v) / (high - low or 1):.1f}"
            for i, v in enumerate(values)
        )
        dashes = f"stroke-dasharray='{4 + 3 * number} {3 * number}'"  # so that lines on top of each other all show
        color = COLORS[number % len(COLORS)]
        drawn.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2' {dashes}/>")
        drawn.append(text(MARGIN + WIDTH - 100, top + 20 + 16 * number, side, f"fill='{color}'"))
    return drawn


def bars(rows: list[tuple[str, str, dict[str, Any]]], top: int) -> list[str]:
    """Tokens a second of each pair of sides, by the ratio's own two medians."""
    left = 3 * MARGIN + WIDTH
    speeds = [(f"{peer}, {part}", figures["tokens_per_s"]) for peer, part, figures in rows]
    most = max(median(speed["ours"]) for _, speed in speeds)
    most = max(most, *(median(speed["theirs"]) for _, speed in speeds))
    drawn = [frame(left, top, "tokens/s (dualtune above, the peer below)")]
    height = HEIGHT / len(speeds)
    for number, (name, speed) in enumerate(speeds):
        for side, (key, color) in enumerate((("ours", COLORS[0]), ("theirs", COLORS[1]))):
            value, y = median(speed[key]), top + height * (number + 0.1 + 0.4 * side)
            size = f"width='{WIDTH * 0.6 * value / most:.1f}' height='{height * 0.36:.1f}'"
            drawn.append(f"<rect x='{left}' y='{y:.1f}' {size} fill='{color}'/>")
            label = f"{value:.0f}" + (f"  {name}: {speed['ratio']['median']:.2f}x" if side else "")
            drawn.append(text(left + 5 + WIDTH * 0.6 * value / most, y + height * 0.3, label))
    return drawn


def frame(left: float, top: float, title: str) -> str:
    box = f"<rect x='{left}' y='{top}' width='{WIDTH}' height='{HEIGHT}' fill='none' stroke='#999'/>"
    return box + text(left, top - 8, title)


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"
