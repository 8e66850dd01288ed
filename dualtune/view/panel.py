"""The numbers of a run as a few lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from dualtune.io.fields import shown
from dualtune.text.escape import one_line
from dualtune.text.show import cut, fitted, in_bytes, in_time
from dualtune.view.run_view import RunView

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"
MOST_SPARK = 40  # columns
MAX_SAMPLES = 3  # shown


def panel(view: RunView, width: int, now: float) -> list[str]:
    """Return the lines, at most `width` columns each: loss, evaluations, memory and checkpoint, samples."""
    lines: list[str] = []
    if view.last is not None:
        number = f"{view.last.loss:.4f}"
        spark = sparkline(view.losses.points(), max(0, min(MOST_SPARK, width - 14 - len(number))))
        lines.append(f"{'curve':<11} {spark}  {number}")
    if view.evals:
        step, loss = view.evals[-1]
        fields = [(f"{loss:.4f} after step {step}", f"{loss:.4f}")]
        if view.best is not None:
            best = f"best {view.best.eval_loss:.4f}"
            fields.append((f"{best} after step {view.best.step}", best))
        lines.append(f"{'evaluated':<11} {fitted(fields, width - 12)}")
    if state := _state(view, now):
        lines.append(f"{'state':<11} {fitted(state, width - 12)}")
    for sample in view.samples[:MAX_SAMPLES]:
        prompt, answer = (shown(one_line(text), max(8, width)) for text in (sample.prompt, sample.answer))
        lines.append(f"{'sample':<11} {cut(prompt, max(8, width // 3))} → {answer}")
    return [cut(line, width) for line in lines]


def _state(view: RunView, now: float) -> list[tuple[str, ...]]:
    fields: list[tuple[str, ...]] = []
    if view.used_bytes is not None:
        used = f"memory {in_bytes(view.used_bytes)}"
        limit = view.limit_bytes
        fields.append((f"{used} of {in_bytes(limit)}", used) if limit else (used,))
    if view.saved is not None:
        step, when = view.saved
        fields.append((f"checkpoint {step} saved {in_time(max(0.0, now - when))} ago", f"checkpoint {step}"))
    return fields


def sparkline(values: Sequence[float], columns: int) -> str:
    """Return a curve in one line: the mean of the values of each column, from the lowest block to the highest."""
    if len(values) > columns:
        bounds = [i * len(values) // columns for i in range(columns + 1)] if columns else [0]
        groups = [values[a:b] for a, b in pairwise(bounds)]
        values = [math.fsum(group) / len(group) if all(map(math.isfinite, group)) else math.nan for group in groups]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] if math.isfinite(v) else NOT_FINITE for v in values)
