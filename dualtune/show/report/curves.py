"""The curves of a run: the rows of metrics.jsonl as columns, thinned to what a page can draw."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualtune.base.fields import number
from dualtune.base.redaction import redact
from dualtune.train.health import end_loss
from dualtune.train.state.metrics import History, append_row, time_of

COLUMNS = (
    "loss", "lr", "grad_norm", "tokens_per_s", "documents_per_min", "peak_bytes", "num_tokens", "step_s", "epoch",
)  # fmt: skip
DRAWN = ("loss", "smooth", "lr", "grad_norm", "tokens_per_s", "peak_bytes")
# The metrics of an objective that have a plot of their own where a run has them, and what it is called.
OF_OBJECTIVES = {
    "reward": "Mean reward of the samples",
    "reward_margin": "Margin between the rewards of chosen and rejected answers",
    "reward_accuracy": "Share of the pairs in the right order",
    "chosen_logp": "Log-probability of the chosen answers",
    "rejected_logp": "Log-probability of the rejected answers",
    "kl": "Divergence from the reference, in nats",
    "entropy": "Entropy of a sampled token, in nats",
}
MAX_POINTS = 2000  # of a curve, about one for each pixel
MAX_EVENTS = 500  # shown; the last ones
MAX_MESSAGE = 600  # characters
MAX_STEP = 1 << 53  # a larger number is not a step, and JavaScript cannot hold it
SMOOTHED_OVER = 50  # the time constant of the smoothed loss is this part of the steps


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step: an event, or an evaluation with its loss."""

    step: int
    tokens: float
    seconds: float
    kind: str = ""
    text: str = ""
    loss: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # of an evaluation, those of OF_OBJECTIVES


@dataclass(slots=True)
class Curves:
    """The numbers of a run, one for each step that is recorded; NaN for what a row lacks."""

    history: History = field(default_factory=History)
    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    measured: dict[str, array[float]] = field(default_factory=lambda: {})  # those of OF_OBJECTIVES that a row had
    tokens: array[float] = field(default_factory=lambda: array("d"))  # trained on so far
    seconds: array[float] = field(default_factory=lambda: array("d"))  # since the first row
    events: list[Mark] = field(default_factory=lambda: [])
    num_events: int = 0
    evals: list[Mark] = field(default_factory=lambda: [])
    first_time: str = ""  # ISO 8601; of the first and the last row
    last_time: str = ""
    began: float = 0.0  # the first, in seconds since 1970

    @property
    def best(self) -> Mark | None:
        """The evaluation with the lowest loss after the first step."""
        after = [mark for mark in self.evals if mark.step > 0 and math.isfinite(mark.loss)]
        return min(after, key=lambda mark: mark.loss, default=None)

    @property
    def peak_bytes(self) -> float | None:
        """The highest peak of memory of all steps."""
        return max(filter(math.isfinite, self.columns["peak_bytes"]), default=None)

    @property
    def time_constant(self) -> int:
        """How many steps the smoothed loss looks back."""
        return max(1, round(len(self.steps) / SMOOTHED_OVER))

    def smooth(self) -> list[float]:
        """Return an exponential moving average of the loss, without the weight of its start; NaN leaves it as it is."""
        keep, mean, weight = math.exp(-1 / self.time_constant), 0.0, 0.0
        means: list[float] = []
        for loss in self.columns["loss"]:
            if math.isfinite(loss):
                mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
            means.append(mean / weight if weight else math.nan)
        return means

    @property
    def end_loss(self) -> float | None:
        """The training loss at the end, NaN if the last loss is not finite; None before the first step."""
        return end_loss(self.history.losses)

    def as_json(self) -> dict[str, Any]:
        """Return what the page draws: None for a number that is not finite."""
        chosen = _thinned(self.columns["loss"], self.columns["grad_norm"])
        columns: dict[str, Sequence[float]] = {**self.columns, **self.measured, "smooth": self.smooth()}
        best = self.best
        return {
            "x": {name: _picked(column, chosen) for name, column in self._x().items()},
            "series": {name: _picked(columns[name], chosen) for name in (*DRAWN, *self.measured)},
            "measured": [*self.measured],  # the series that not every run has
            "evals": [_as_json(mark) for mark in self.evals],
            "best": best and _as_json(best),
            "events": [_as_json(mark) for mark in self.events],
        }

    def _x(self) -> dict[str, Sequence[float]]:
        return {"step": self.steps, "tokens": self.tokens, "seconds": self.seconds}

    def note(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        if not 0 <= row["step"] < MAX_STEP:
            return
        self.history.note(row)
        if "eval_loss" not in row and "loss" in row:
            self._note_step(row)
        seconds = self._note_time(row)
        where = (row["step"], self.tokens[-1] if self.tokens else 0.0, seconds)
        if "eval_loss" in row:
            while self.evals and self.evals[-1].step >= row["step"]:  # a resumed run repeats some
                self.evals.pop()
            metrics = {name: value for name in OF_OBJECTIVES if (value := number(row.get(f"eval_{name}"))) is not None}
            self.evals.append(Mark(*where, loss=row["eval_loss"], metrics=metrics))
        elif "event" in row:
            self.num_events += 1
            kind, text = (str(row.get(key, ""))[:MAX_MESSAGE] for key in ("event", "message"))
            self.events = [*self.events[1 - MAX_EVENTS :], Mark(*where, kind, redact(text))]

    def _note_step(self, row: Mapping[str, Any]) -> None:
        self.steps.append(row["step"])
        for name, column in self.columns.items():
            value = number(row.get(name))
            column.append(math.nan if value is None else float(value))
        measured = {name: float(value) for name in OF_OBJECTIVES if (value := number(row.get(name))) is not None}
        append_row(self.measured, measured, len(self.steps) - 1)
        trained = self.columns["num_tokens"][-1]
        before = self.tokens[-1] if self.tokens else 0.0
        self.tokens.append(before + (trained if math.isfinite(trained) else 0.0))

    def _note_time(self, row: Mapping[str, Any]) -> float:
        """Return the seconds since the first row; of a run whose rows have no time, those spent in steps."""
        is_step = len(self.seconds) < len(self.steps)
        before = self.seconds[-1] if self.seconds else 0.0
        if (time := time_of(row)) is not None:
            if not self.first_time:
                self.first_time, self.began = row["time"], time
            self.last_time = row["time"]
            seconds = time - self.began
        else:
            spent = self.columns["step_s"][-1] if is_step else 0.0
            seconds = before + (spent if math.isfinite(spent) else 0.0)
        seconds = max(before, seconds)  # a clock may be set back
        if is_step:
            self.seconds.append(seconds)
        return seconds


def curves_of(rows: Iterable[Mapping[str, Any]]) -> Curves:
    """Return the curves of a run from its rows."""
    curves = Curves()
    for row in rows:
        curves.note(row)
    return curves


def _thinned(losses: Sequence[float], norms: Sequence[float]) -> list[int]:
    """Return the indices to draw: of each group of neighbours its lowest and highest loss and its highest norm."""
    size = math.ceil(3 * len(losses) / MAX_POINTS)
    if size < 4:
        return list(range(len(losses)))
    chosen: set[int] = {0, len(losses) - 1}
    for begin in range(0, len(losses), size):
        group = range(begin, min(begin + size, len(losses)))
        chosen |= {min(group, key=lambda i: _low(losses[i])), max(group, key=lambda i: _high(losses[i]))}
        chosen.add(max(group, key=lambda i: _high(norms[i])))
    return sorted(chosen)


def _low(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _high(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _picked(column: Sequence[float], chosen: Sequence[int]) -> list[float | None]:
    return [finite(column[i]) for i in chosen]


def finite(value: float) -> float | None:
    """Return a number with the digits that a page can show, None for NaN and infinity."""
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _as_json(mark: Mark) -> dict[str, Any]:
    place: dict[str, Any] = {"step": mark.step, "tokens": mark.tokens, "seconds": finite(mark.seconds)}
    if mark.kind:
        return place | {"kind": mark.kind, "text": mark.text}
    return place | {"loss": finite(mark.loss), **{name: finite(value) for name, value in mark.metrics.items()}}
