"""Several runs beside each other: a table of their numbers and of the keys that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

from dualtune.report.page import as_text as _text
from dualtune.report.run_files import RunFiles, are_comparable, best_of
from dualtune.report.run_sections import loss_text, median_speed
from dualtune.report.settings import differing
from dualtune.text.show import in_time

Cell = tuple[str, float | str | None]  # what it shows, and what it is sorted by


def comparison(runs: Sequence[RunFiles]) -> str:
    """Return the table of the runs. Its heads sort it; the best run is marked."""
    keys = differing([run.config for run in runs])
    heads = ["run", "verdict", "steps", "loss", "evaluation", "best evaluation", "tokens/s", "time"]
    heads += [key for key, _ in keys]
    best = best_of(runs)
    columns = zip_longest(*(values for _, values in keys)) if keys else [()] * len(runs)
    rows = [
        _row(run, [*_numbers(run), *((value, _sortable(value)) for value in values)], index, run is best)
        for index, (run, values) in enumerate(zip(runs, columns, strict=True))
    ]
    buttons = "".join(
        f'<th scope=col aria-sort="none"><button type="button" class="sort">{_text(head)}</button></th>'
        for head in heads
    )
    note = "" if keys else "<p>The configs are equal.</p>\n"
    return (
        '<div class="scroll" role="region" aria-label="Runs" tabindex="0"><table id="runs" class="runs">\n'
        "<caption>The runs, with the keys in which their configs differ. Click a column head to sort.</caption>\n"
        f"<thead><tr>{buttons}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody></table></div>\n"
        f"{note}{_criterion(runs, best)}"
    )


def _criterion(runs: Sequence[RunFiles], best: RunFiles | None) -> str:
    """Say by what the runs are compared."""
    if not are_comparable(runs):
        return "<p>The runs were evaluated on different documents or tokens, so none is called the best.</p>\n"
    if best is None:
        return ""
    what = "evaluation loss with the weights that it writes" if best.score.is_held_out else "training loss at the end"
    return f"<p>Of the runs that were trained to their end, the best has the lowest {what}.</p>\n"


def _numbers(run: RunFiles) -> list[Cell]:
    curves, speed = run.curves, median_speed(run)
    loss = curves.end_loss
    seconds = curves.seconds[-1] if curves.seconds and curves.seconds[-1] < 1e9 else None
    word = run.verdict.word if run.state == "done" else f"{run.verdict.word} ({run.state})"
    return [
        (word, word),
        (f"{curves.history.step or 0:,}", curves.history.step or 0),
        _loss(loss),
        _loss(curves.history.eval_loss),
        _loss(curves.best.loss if curves.best else None),
        ("–", None) if speed is None else (f"{speed:,.0f}", speed),
        ("–", None) if seconds is None else (in_time(seconds), seconds),
    ]


def _loss(loss: float | None) -> Cell:
    return ("–", None) if loss is None else (loss_text(loss), loss if math.isfinite(loss) else None)


def _sortable(value: str) -> float | str:
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def _row(run: RunFiles, cells: Sequence[Cell], index: int, is_best: bool) -> str:
    dashes = " ".join(map(str, dashes_of(index)))
    mark = ' <span class="mark">best</span>' if is_best else ""
    shown = "".join(f'<td data-sort="{_text("" if by is None else str(by))}">{_text(text)}</td>' for text, by in cells)
    return (
        f'<tr{" class=best" * is_best}><th scope=row data-sort="{_text(run.name)}"><svg class="key" viewBox="0 0 32 8" '
        f'aria-hidden="true"><path class="line{index % 8}" d="M0,4 H32" stroke-dasharray="{dashes}"/></svg>'
        f"{_text(run.name)}{mark}</th>{shown}</tr>\n"
    )


def dashes_of(index: int) -> list[int]:
    """Return the dashes of a run's lines, in pixels: there are eight colours, and every eight runs share a pattern."""
    return [12, 4, *[3, 4] * (index // 8 - 1)] if index >= 8 else []
