"""The numbers of a run so far: what the live line, the log, a notebook and `dualtune watch` show.

The run itself tells them as a hook; `dualtune watch` reads them from the files of the run directory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from dualtune.base.fields import number
from dualtune.engine.backend import MemoryStats
from dualtune.train.hooks import (
    EVALUATION,
    SAMPLES,
    SAVE,
    EvalRecord,
    Event,
    Hook,
    PhaseChange,
    RunInfo,
    SampleRecord,
    StepRecord,
)
from dualtune.train.state import checkpoint
from dualtune.train.state.metrics import each_row, metrics_in
from dualtune.train.state.run_dir import CHECKPOINTS, METRICS

# ----------------------------------------------------------------------------------------------------------------------
# What a run has told so far, from its files: its rows as its hooks got them, and its newest checkpoint.

MAX_TEXT = 10_000  # characters of a message
_NUMBERS = (
    "epoch", "lr", "grad_norm", "num_targets", "num_tokens", "step_s", "tokens_per_s", "documents_per_min",
    "peak_bytes",
)  # fmt: skip


def tell(hook: Hook, row: Mapping[str, Any]) -> None:
    """Pass a row of metrics.jsonl to a hook, as the run did."""
    if "eval_loss" in row:
        hook.on_eval(EvalRecord(row["step"], row["eval_loss"], row["eval_targets"], metrics_in(row)))
    elif "loss" in row:
        numbers: dict[str, Any] = {name: number(row.get(name)) or 0 for name in _NUMBERS}
        hook.on_step(StepRecord(step=row["step"], loss=row["loss"], skipped=row.get("skipped") is True, **numbers))
    else:
        hook.on_event(Event(row["step"], str(row["event"])[:100], str(row.get("message", ""))[:MAX_TEXT]))


def newest_checkpoint(run_dir: Path, last: int | None = None) -> tuple[int, float] | None:
    """Return the step of the newest checkpoint, of those up to step `last`, and when it was saved; None without one."""
    saved = (step for step in checkpoint.steps(run_dir / CHECKPOINTS) if last is None or step <= last)
    if (step := next(saved, None)) is None:
        return None
    return step, checkpoint.path_of(run_dir / CHECKPOINTS, step).stat().st_mtime


# ----------------------------------------------------------------------------------------------------------------------
BETWEEN_STEPS = (EVALUATION, SAMPLES, SAVE)
MAX_POINTS = 256  # of the curve, at most twice as many
MAX_EVALS, MAX_SAMPLES = 10_000, 8  # the newest ones that are kept; a config has at most eight prompts
TIMED_STEPS = 64  # the last ones, whose mean gives the time left: a stall is forgotten


@dataclass(slots=True)
class Mean:
    """The mean of the numbers so far; 0 before the first one."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


class Thinned:
    """A curve in a bounded number of points, each the mean of equally many numbers."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self.every = 1  # numbers of a point
        self._most = most
        self._points: list[float] = []
        self._next = Mean()

    def add(self, value: float) -> None:
        self._next.add(value)
        if self._next.count == self.every:
            self._points.append(self._next.value)
            self._next = Mean()
        if len(self._points) == 2 * self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points, self.every = [(a + b) / 2 for a, b in pairs], 2 * self.every

    def points(self) -> list[float]:
        """Return the points; the last one may be the mean of fewer numbers."""
        return [*self._points, *([self._next.value] if self._next.count else [])]


@dataclass(slots=True)
class RunView(Hook):
    """What a run has done, what it is doing, and when it ends, if nothing stops it early.

    `memory` is asked when the view is drawn, twice a second. Nothing here waits for the device.
    """

    eval_every: int | None
    save_every: int | None
    memory: Callable[[], MemoryStats] | None = None
    limit_bytes: int | None = None  # memory.limit, else the size of the device
    clock: Callable[[], float] = time.time  # seconds since 1970

    num_steps: int = 0  # 0: not known
    first_step: int = 0  # where the curve begins
    evaluates: bool = False
    step: int = 0
    last: StepRecord | None = None
    losses: Thinned = field(default_factory=Thinned)
    evals: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_EVALS))  # (step, loss), by time
    best: EvalRecord | None = None  # of those after the first step
    samples: list[SampleRecord] = field(default_factory=lambda: [])  # of the newest evaluation
    saved: tuple[int, float] | None = None  # step and time of the newest checkpoint
    used_bytes: int | None = None
    phase: str = ""
    began: float = 0.0  # of the phase
    told: float = 0.0  # when the newest step was told
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED_STEPS))
    _spent: dict[str, Mean] = field(default_factory=lambda: {phase: Mean() for phase in BETWEEN_STEPS})
    _phase_step: int = 0
    _save_failed: bool = False

    def on_start(self, info: RunInfo) -> None:
        self.num_steps, self.first_step = info.num_steps, info.first_step
        self.step, self.evaluates = max(self.step, info.first_step), info.num_eval_documents > 0
        if info.first_step:
            self._recall(info)
        self.told = self.clock()

    def _recall(self, info: RunInfo) -> None:
        """Take the rows from before the run was resumed, except for their seconds: it may have had another machine."""
        for row in each_row(info.run_dir / METRICS):
            if row["step"] <= info.first_step:
                if self.last is None and "loss" in row:
                    self.first_step = row["step"] - 1
                tell(self, row)
        self.step = info.first_step
        self._step_s.clear()
        self._save_failed = False
        self.saved = newest_checkpoint(info.run_dir, info.first_step)

    def on_step(self, record: StepRecord) -> None:
        self.step, self.last, self.told = record.step, record, self.clock()
        self.losses.add(record.loss)
        self._step_s.append(record.step_s)

    def measure(self) -> None:
        """Ask for the memory in use now."""
        if self.memory is not None:
            stats = self.memory()
            self.used_bytes, self.limit_bytes = stats.used_bytes, self.limit_bytes or stats.total_bytes

    def on_eval(self, record: EvalRecord) -> None:
        self.evals.append((record.step, record.eval_loss))
        is_better = self.best is None or record.eval_loss < self.best.eval_loss
        if record.step > 0 and math.isfinite(record.eval_loss) and is_better:
            self.best = record

    def on_sample(self, record: SampleRecord) -> None:
        same = [sample for sample in self.samples if sample.step == record.step]
        self.samples = [*same, record][-MAX_SAMPLES:]

    def on_event(self, event: Event) -> None:
        self._save_failed |= event.event == "save_failed"

    def on_phase_change(self, change: PhaseChange) -> None:
        if change.phase not in BETWEEN_STEPS and self.phase not in BETWEEN_STEPS:
            return  # a phase of a step: there are many, and the step's record has their seconds
        now = self.clock()
        self.note_phase(self._phase_step, self.phase, now - self.began, now)
        self._phase_step, self.phase, self.began = change.step, change.phase, now

    def on_end(self) -> None:
        self.on_phase_change(PhaseChange(self.step, "", self.phase))

    def note_phase(self, step: int, phase: str, seconds: float, ended: float) -> None:
        """Note how long a phase took. The phases of a step are not counted: its record has the seconds."""
        if phase in self._spent and seconds >= 0:
            self._spent[phase].add(seconds)
        if phase == SAVE:
            self.saved = self.saved if self._save_failed else (step, ended)
            self._save_failed = False

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds of the steps, evaluations, samples and saves that are still to come; None if not known.

        By the mean of the last steps, and of each of the others so far. What has not been measured yet counts nothing,
        and so do unscheduled saves.
        """
        if not self.num_steps or not self._step_s:
            return None
        evaluated = self.evals[-1][0] if self.evals else -1
        saved = self.saved[0] if self.saved else -1
        num_evals = self._still_due(self.eval_every, evaluated) if self.evaluates else 0
        spent = {phase: mean.value for phase, mean in self._spent.items()}
        return (
            (self.num_steps - self.step) * fmean(self._step_s)
            + num_evals * (spent[EVALUATION] + spent[SAMPLES])
            + self._still_due(self.save_every, saved) * spent[SAVE]
        )

    def _still_due(self, every: int | None, done: int) -> int:
        """Return how often something is still due that was last done at a step, and is due at the end, too."""
        before = max(done, self.step - 1)  # it may be due after the present step
        if before >= self.num_steps:
            return 0
        return 1 + ((self.num_steps - 1) // every - before // every if every else 0)
