"""Several runs beside each other: a table of their numbers and of the keys that differ, and pictures of losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

from dualtune.base.fields import number
from dualtune.base.text import in_time
from dualtune.show.report.run_files import RunFiles, best_of, have_same_documents, have_same_loss
from dualtune.show.report.run_sections import differing, flat, loss_text, median_speed, shown_value

# ----------------------------------------------------------------------------------------------------------------------
# The loss of several runs over each key in which their configs differ, as pictures that need no script.

WIDTH, HEIGHT = 440, 260  # of a picture, in units of its own; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 34  # the margins
MIN_RUNS, MAX_PLOTS, MAX_LINES, MAX_TICKS = 3, 8, 8, 8
CUT = 4  # how many times as far above the best loss as the median a loss may be; what is higher lies on the edge
NAMED = 20  # characters of a value on the axis


@dataclass(frozen=True, slots=True)
class Dot:
    """A run in a picture."""

    run: RunFiles
    loss: float
    values: dict[str, Any]  # its config, by key


def scatter(runs: Sequence[RunFiles]) -> dict[str, Any] | None:
    """Return a picture for each key that differs; None for fewer than three runs with a loss."""
    dots = [Dot(run, loss, flat(run.config)) for run in runs if (loss := _loss(run)) is not None]
    keys = [key for key, _ in differing([dot.run.config for dot in dots])]
    if len(dots) < MIN_RUNS or not keys or all(dot.loss == math.inf for dot in dots):
        return None
    others = {keys[0]: keys[1], keys[1]: keys[0]} if len(keys) == 2 else {}
    winner, highest = best_of([dot.run for dot in dots]), _highest(dots)
    best = next((dot for dot in dots if dot.run is winner), None)
    held_out = all(dot.run.score.is_held_out for dot in dots if dot.run.is_done)
    loss_kind = "evaluation loss of the weights that a run writes" if held_out else "training loss at the end"
    edge = " A triangle is a loss above the picture." * any(dot.loss > highest for dot in dots)
    unfinished = " A ring is a run that was not trained to its end." * any(not dot.run.is_done for dot in dots)
    return {
        "hint": f"The {loss_kind}.{edge}{unfinished}",
        "pictures": [_picture(dots, key, others.get(key, ""), highest, best) for key in keys[:MAX_PLOTS]],
    }


def _loss(run: RunFiles) -> float | None:
    """Return the loss of the score, infinity for one that is not finite, None before the first step."""
    score = run.score
    return (math.inf if score.loss is None else score.loss) if score.step else None


def _highest(dots: Sequence[Dot]) -> float:
    """Return the loss at the top: one run that diverged must not make all others equal."""
    losses = [dot.loss for dot in dots if dot.loss < math.inf]
    lowest, middle = min(losses), median(losses)
    return min(max(losses), lowest + CUT * (middle - lowest)) if middle > lowest else max(losses)


def _picture(dots: Sequence[Dot], key: str, other: str, high: float, best: Dot | None) -> dict[str, Any]:
    """Return the picture of a key. `other`: the only other key that differs, whose values get a line each; or empty.

    `high`: the loss at the top.
    """
    place, ticks = _axis([dot.values.get(key) for dot in dots])
    low = min(dot.loss for dot in dots)

    def height(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def at(dot: Dot) -> tuple[float, float]:
        share = (min(dot.loss, high) - low) / (high - low) if high > low else 0.5
        return LEFT + place(dot.values.get(key)) * (WIDTH - LEFT - RIGHT), height(share)

    # Runs with the same value of the other key have a colour and a line, unless there are too many to tell them apart.
    series = [shown_value(dot.values.get(other)) for dot in dots] if other else []
    names = list(dict.fromkeys(series))
    if len(names) > MAX_LINES:
        series, names = [], []
    marks: list[dict[str, Any]] = []
    for index, dot in enumerate(dots):
        x, y = at(dot)
        color = names.index(series[index]) if series else 0
        kind, title = f"dot{color}{'' if dot.run.is_done else ' ring'}", f"{dot.run.name}: {loss_text(dot.loss)}"
        marks.append({"x": x, "y": y, "kind": kind, "title": title, "is_high": dot.loss > high, "is_best": dot is best})
    # Whoever does not see the picture hears first what it shows.
    label = f"{key}: {len(dots)} runs"
    if best is not None:
        label += f", the best has {shown_value(best.values.get(key))} with {loss_text(best.loss)}"
    return {
        "key": key, "other": other, "names": names, "label": label, "marks": marks,
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT,
        "lines": [sorted(at(dot) for dot, own in zip(dots, series, strict=True) if own == name) for name in names],
        "grid": [
            (height(share), loss_text(low + share * (high - low) if high > low else low))
            for share in ((0, 0.5, 1) if high > low else (0.5,))
        ],
        "ticks": _apart([(LEFT + share * (WIDTH - LEFT - RIGHT), name) for share, name in sorted(ticks)]),
    }  # fmt: skip


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the ticks whose names do not cover the one before."""
    shown: list[tuple[float, str]] = []
    end = -math.inf
    for x, name in ticks:
        half = 3.6 * len(name)
        if x - half > end:
            shown.append((x, name))
            end = x + half
    return shown


Place = Callable[[Any], float]  # from a value to its place between the ends of the axis, 0 to 1


def _axis(values: Sequence[Any]) -> tuple[Place, list[tuple[float, str]]]:
    """Return where values lie, and the marks of the axis: numbers by size, or by their logarithm; others in order."""
    distinct = list({shown_value(value): value for value in values}.values())
    if all(number(value) is not None for value in distinct):
        low, high = float(min(distinct)), float(max(distinct))
        scale: Callable[[float], float] = math.log if 0 < low <= high / 10 else float

        def by_size(value: Any) -> float:
            if low == high:  # 1 and 1.0, or integers that are equal as floats
                return 0.5
            return 0.05 + 0.9 * (scale(value) - scale(low)) / (scale(high) - scale(low))

        shown = sorted(distinct) if len(distinct) <= MAX_TICKS else [low, high]
        return by_size, [(by_size(value), f"{value:g}") for value in shown]
    names = [shown_value(value) for value in distinct]

    def in_order(value: Any) -> float:
        return (names.index(shown_value(value)) + 0.5) / len(names)

    shown_names = [(in_order(value), shown_value(value)[:NAMED]) for value in distinct]
    return in_order, shown_names if len(names) <= MAX_TICKS else [shown_names[0], shown_names[-1]]


# ----------------------------------------------------------------------------------------------------------------------
Cell = tuple[str, float | str | None]  # what it shows, and what it is sorted by


def comparison(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the table of the runs."""
    keys, best = differing([run.config for run in runs]), best_of(runs)
    heads = ["run", "verdict", "steps", "loss", "evaluation", "best evaluation", "tokens/s", "time"]
    shares = [_right_pairs(run) for run in runs]
    compares = any(share is not None for share in shares)
    columns = zip_longest(*(values for _, values in keys)) if keys else [()] * len(runs)
    rows = [
        (
            run.name,
            dashes_of(index),
            run is best,
            [*_numbers(run), *[_share_cell(share)] * compares, *((value, _sortable(value)) for value in values)],
        )
        for index, (run, values, share) in enumerate(zip(runs, columns, shares, strict=True))
    ]
    heads += ["pairs in order"] * compares + [key for key, _ in keys]
    return {"heads": heads, "keys": keys, "rows": rows, "criterion": _criterion(runs, best)}


def _criterion(runs: Sequence[RunFiles], best: RunFiles | None) -> str:
    """Return the measure by which the runs are compared."""
    if not have_same_documents(runs):
        return "The runs were evaluated on different documents or tokens, so none is called the best."
    if not have_same_loss(runs):
        return "The runs minimize different losses, so none is called the best."
    if best is None:
        return ""
    loss_kind = (
        "evaluation loss with the weights that it writes" if best.score.is_held_out else "training loss at the end"
    )
    return f"Of the runs that were trained to their end, the best has the lowest {loss_kind}."


def _numbers(run: RunFiles) -> list[Cell]:
    curves, speed = run.curves, median_speed(run)
    loss = curves.end_loss
    seconds = curves.seconds[-1] if curves.seconds and curves.seconds[-1] < 1e9 else None
    word = run.verdict.word if run.state == "done" else f"{run.verdict.word} ({run.state})"
    return [
        (word, word),
        (f"{curves.history.step or 0:,}", curves.history.step or 0),
        _loss_cell(loss),
        _loss_cell(curves.history.eval_loss),
        _loss_cell(curves.best.loss if curves.best else None),
        ("–", None) if speed is None else (f"{speed:,.0f}", speed),
        ("–", None) if seconds is None else (in_time(seconds), seconds),
    ]


def _right_pairs(run: RunFiles) -> float | None:
    """Return the share of held-out pairs in the right order, of the last evaluation; None for a run without."""
    metrics = run.curves.history.metrics
    return metrics[-1].get("eval_reward_accuracy") if metrics else None


def _share_cell(share: float | None) -> Cell:
    return ("–", None) if share is None else (f"{share:.1%}", share)


def _loss_cell(loss: float | None) -> Cell:
    return ("–", None) if loss is None else (loss_text(loss), loss if math.isfinite(loss) else None)


def _sortable(value: str) -> float | str:
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def dashes_of(index: int) -> list[int]:
    """Return the dashes of a run's lines, in pixels: there are eight colours, and every eight runs share a pattern."""
    return [12, 4, *[3, 4] * (index // 8 - 1)] if index >= 8 else []
