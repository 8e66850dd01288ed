"""The console of rich, for bars and tables, which escapes foreign text like `terminal.say`."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from dualtune.base.fields import shown
from dualtune.base.text import visible


class Console(rich.console.Console):
    """A console that prints text literally: brackets are not markup, and only rich's own control codes get through."""

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(file=file, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


# ----------------------------------------------------------------------------------------------------------------------
# Curves in a terminal, drawn by plotext: in colours on a terminal, in plain ASCII elsewhere.

Points = Sequence[tuple[float, float]]
Part = tuple[str, dict[str, Any]]  # text, with arguments for `click.style`

HEIGHT = 18  # lines
COLORS = ("blue", "orange", "green", "red", "magenta", "cyan")
ASCII = str.maketrans(
    {"┌": "+", "┐": "+", "└": "+", "┘": "+", "─": "-", "│": "|", "┤": "+", "┬": "+", "├": "+", "┼": "+"}
)
_COLOR = re.compile(r"\x1b\[([\d;]*)m")


def drawn(curves: Mapping[str, Points], columns: int, *, plain: bool) -> list[list[Part]]:
    """Return lines of parts: a curve for each name, over the step. Values that are not finite are left out.

    The mean of the points that fall into one column is drawn. `plain`: ASCII without colours, and the first letter of
    a name as its mark. Without any point, one line says so.
    """
    finite = [(name, [(x, y) for x, y in points if math.isfinite(y)]) for name, points in curves.items()]
    if not any(points for _, points in finite):
        return [[("there is no loss to draw", {})]]
    plot = importlib.import_module("plotext")
    plot.clear_figure()
    plot.theme("clear")
    plot.limit_size(False, False)  # else by the size of a terminal, which may not be the target
    plot.plotsize(columns, HEIGHT)
    plot.xlabel("step")
    for i, (name, points) in enumerate(finite):
        if points:
            xs, ys = zip(*_thinned(points, columns), strict=True)
            color = None if plain else COLORS[i % len(COLORS)]
            plot.plot(xs, ys, label=shown(name, columns // 2), marker=name[0] if plain else "braille", color=color)
    text: str = plot.build()
    lines = [[*_parts(line)] for line in text.rstrip("\n").splitlines()]
    if not plain:
        return lines
    return [[("".join(part for part, _ in line).translate(ASCII).rstrip(), {})] for line in lines]


def _thinned(points: Points, columns: int) -> Iterator[tuple[float, float]]:
    """Yield the mean of the points in each column."""
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    width = (last - first) / columns or 1.0
    groups: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        groups.setdefault(int((x - first) / width), []).append((x, y))
    for together in groups.values():
        yield sum(x for x, _ in together) / len(together), sum(y for _, y in together) / len(together)


def _parts(line: str) -> Iterator[Part]:
    """Yield the text between the colour codes of a line, each with its colour: nothing else of plotext gets through."""
    style: dict[str, Any] = {}
    at = 0
    for code in _COLOR.finditer(line):
        if line[at : code.start()]:
            yield line[at : code.start()], style
        numbers = code[1].split(";")
        style = {"fg": int(numbers[2])} if numbers[:2] == ["38", "5"] else {}
        at = code.end()
    if line[at:]:
        yield line[at:], style
