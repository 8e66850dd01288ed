"""Several runs beside each other: a table of their numbers and of the keys that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

from dualtune.report.page import as_text as _text
from dualtune.report.run_files import RunFiles, are_comparable
from dualtune.report.run_sections import loss_text, median_speed
from dualtune.report.settings import differing
from dualtune.text.show import in_time

Cell = tuple[str, float | str | None]  # what it shows, and what it is sorted by


def comparison(runs: Sequence[RunFiles]) -> str:
    """Return the table of the runs. Its heads sort it; the run with the lowest evaluation loss is marked."""
    keys = differing([run.config for run in runs])
    heads = ["run", "verdict", "steps", "loss", "evaluation", "best evaluation", "tokens/s", "time"]
    heads += [key for key, _ in keys]
    best = _best(runs) if are_comparable(runs) else None
    columns = zip_longest(*(values for _, values in keys)) if keys else [()] * len(runs)
    rows = [
        _row(run, [*_numbers(run), *((value, _sortable(value)) for value in values)], index, index == best)
        for index, (run, values) in enumerate(zip(runs, columns, strict=True))
    ]
    buttons = "".join(
        f'<th scope=col aria-sort="none"><button type="button" class="sort">{_text(head)}</button></th>'
        for head in heads
    )
    note = "" if keys else "<p>The configs are equal.</p>\n"
    if not are_comparable(runs):
        note += "<p>The runs were evaluated on different documents or tokens, so none is called the best.</p>\n"
    return (
        '<div class="scroll" role="region" aria-label="Runs" tabindex="0"><table id="runs" class="runs">\n'
        "<caption>The runs, with the keys in which their configs differ. Click a head to sort.</caption>\n"
        f"<thead><tr>{buttons}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody></table></div>\n{note}"
    )


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


def _best(runs: Sequence[RunFiles]) -> int | None:
    """Return the index of the run with the lowest evaluation loss, None if no run has one."""
    known = [(best.loss, index) for index, run in enumerate(runs) if (best := run.curves.best) is not None]
    return min(known)[1] if known else None


def _sortable(value: str) -> float | str:
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def _row(run: RunFiles, cells: Sequence[Cell], index: int, is_best: bool) -> str:
    mark = ' <span class="mark">best</span>' if is_best else ""
    shown = "".join(f'<td data-sort="{_text("" if by is None else str(by))}">{_text(text)}</td>' for text, by in cells)
    return (
        f'<tr{" class=best" * is_best}><th scope=row data-sort="{_text(run.name)}"><span class="swatch run{index % 8}">'
        f"</span>{_text(run.name)}{mark}</th>{shown}</tr>\n"
    )
