"""A run in a Jupyter notebook: one table with a curve below its cell, which updates itself while the run trains.

IPython is not needed and never loaded first: only a session that runs in its kernel has it already.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from dualtune.base.text import in_bytes, in_time
from dualtune.show.report.page import render
from dualtune.show.view.lines import RunLines
from dualtune.show.view.run_view import RunView
from dualtune.train.hooks import EvalRecord, Event, RunInfo, SampleRecord, StepRecord

EVERY_S = 0.5  # seconds between two updates
NUM_LINES = 5  # of the log
WIDTH, HEIGHT, EDGE = 640, 160, 8  # of the curve
MAX_TEXT = 500  # characters of a prompt or an answer
Display = Callable[..., Any]


def notebook_display() -> Display | None:
    """Return IPython's function `display` if this process is the kernel of a notebook, else None."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:  # a terminal has a shell without a kernel
        return None
    return importlib.import_module("IPython.display").display


class NotebookView(RunLines):
    """Shows a run in one output of a notebook. A front end that fails is reported like any hook; the run goes on."""

    def __init__(self, view: RunView, log_every: int, display: Display) -> None:
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        super().__init__(view, log_every, self._lines.append)
        self._display = display
        self._handle: Any = None
        self._shown = -math.inf

    def on_start(self, info: RunInfo) -> None:
        super().on_start(info)
        self._show(at_once=True)

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        self._show()

    def on_eval(self, record: EvalRecord) -> None:
        super().on_eval(record)
        self._show(at_once=True)

    def on_sample(self, record: SampleRecord) -> None:
        super().on_sample(record)
        self._show()

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        self._show()

    def on_end(self) -> None:
        super().on_end()
        self._show(at_once=True)

    def _show(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._shown < EVERY_S:
            return
        self._shown = time.monotonic()
        self.view.measure()
        page = Fragment(as_html(self.view, self._lines), "\n".join(self._lines))
        if self._handle is None:
            self._handle = self._display(page, display_id=True)
        else:
            self._handle.update(page)


class Fragment:
    """A piece of HTML as IPython displays it, with plain text for what cannot show HTML."""

    def __init__(self, html: str, text: str) -> None:
        self._html, self._text = html, text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


def as_html(view: RunView, lines: Iterable[str]) -> str:
    """Return the table, the curve, the samples and the last lines of the log; all text is escaped."""
    samples = [(sample.prompt[:MAX_TEXT], sample.answer[:MAX_TEXT]) for sample in view.samples]
    return render(
        "notebook.html", numbers=_numbers(view), curve=curve(view), samples=samples, view=view, lines=list(lines)
    )


def _numbers(view: RunView) -> list[tuple[str, str]]:
    rows = [("step", f"{view.step}/{view.num_steps}")]
    if (record := view.last) is not None:
        rows += [("loss", f"{record.loss:.4f}"), ("learning rate", f"{record.lr:.2e}")]
        rows.append(("speed", f"{record.tokens_per_s:,.0f} tokens/s"))
    if view.evals:
        rows.append(("evaluation", f"{view.evals[-1][1]:.4f} after step {view.evals[-1][0]}"))
    if view.best is not None:
        rows.append(("best evaluation", f"{view.best.eval_loss:.4f} after step {view.best.step}"))
    if view.used_bytes is not None and view.limit_bytes:
        rows.append(("memory", f"{in_bytes(view.used_bytes)} of {in_bytes(view.limit_bytes)}"))
    if view.saved is not None:
        rows.append(("checkpoint", f"after step {view.saved[0]}"))
    if (seconds := view.seconds_left) is not None and view.step < view.num_steps:
        rows.append(("time left", in_time(seconds)))
    return rows


def curve(view: RunView) -> dict[str, Any] | None:
    """Return the loss as a line and the evaluations as dots; None before there are two finite points."""
    every, first = view.losses.every, view.first_step
    line = [(first + (i + 1) * every, y) for i, y in enumerate(view.losses.points()) if math.isfinite(y)]
    dots = [(step, loss) for step, loss in view.evals if math.isfinite(loss)]
    if len(line) < 2:
        return None
    ys = [y for _, y in (*line, *dots)]
    low, high, last = min(ys), max(ys), max(view.num_steps, line[-1][0])

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - first) / ((last - first) or 1), (y - low) / ((high - low) or 1)
        return EDGE + across * (WIDTH - 2 * EDGE), HEIGHT - EDGE - up * (HEIGHT - 2 * EDGE)

    return {
        "width": WIDTH, "height": HEIGHT,
        "line": [place(x, y) for x, y in line], "dots": [place(x, y) for x, y in dots],
        "label": f"loss from {line[0][1]:.4f} to {line[-1][1]:.4f}, evaluations as dots",
    }  # fmt: skip
