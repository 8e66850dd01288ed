"""What `dualtune train` shows: the phases of the run, a line every `log_every` steps, and on a terminal its state."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from dualtune.base.redaction import redact
from dualtune.base.text import fitted, in_time
from dualtune.cli.screen import REFRESH_HZ, Phases, phases, width
from dualtune.cli.terminal import say
from dualtune.engine.backend import MemoryStats
from dualtune.show.view.lines import Fields, RunLines, panel
from dualtune.show.view.run_view import RunView
from dualtune.train.hooks import (
    FINGERPRINTS,
    RESULT,
    SAMPLES,
    TRACKERS,
    EvalRecord,
    Event,
    Hook,
    PhaseChange,
    RunInfo,
    SampleRecord,
    StepRecord,
    StepTaken,
)

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.config.schema import RunConfig
    from dualtune.engine.backend import Backend
    from dualtune.use.transfer.remotes.retries import Patience

# ----------------------------------------------------------------------------------------------------------------------
# The progress of a tier of `dualtune validate`: on a terminal in the live line, elsewhere in ten lines.

LINES = 10


class TierShown(Hook):
    def __init__(self, name: str, memory: Callable[[], MemoryStats], shown: Phases) -> None:
        self._name, self._memory, self._shown = name, memory, shown
        self._num_steps = 0
        shown.begin("running", name)

    def on_start(self, info: RunInfo) -> None:
        self._num_steps = info.num_steps

    def on_step(self, record: StepRecord) -> None:
        loss, speed = f"loss {record.loss:.4f}", f"{record.tokens_per_s:,.0f} tokens/s"
        memory = f"memory {self._memory().used_bytes / 1e6:,.1f} MB"
        if self._shown.is_live:
            return self._shown.update(record.step, self._num_steps, (loss,), (memory,), (speed,))
        if record.step % max(1, self._num_steps // LINES) == 0 or record.step == self._num_steps:
            self._shown.tell(
                f"{self._name:<11} step {record.step:>4}/{self._num_steps}  {loss}  {speed}  {memory}  "
                f"{in_time(self._shown.seconds, 1)}"
            )
        return None


# ----------------------------------------------------------------------------------------------------------------------
# What `dualtune push` and `dualtune pull` show during a transfer: a bar on a terminal, else a line at the end.


@contextlib.contextmanager
def transferring(verb: str, retries: int) -> Generator[Patience]:
    """Yield the `Patience` of a transfer with a progress bar. It starts with the first bytes: before, ssh may ask."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from dualtune.cli.console import Console
    from dualtune.use.transfer.remotes.retries import Patience

    columns = (TextColumn(f"{verb:<11}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(), transient=True, disable=not sys.stdout.isatty())
    task = bar.add_task(verb, total=None, visible=False)
    first_bytes: int | None = None

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal first_bytes
        first_bytes = done_bytes if first_bytes is None else first_bytes
        if done_bytes == first_bytes and not bar.live.is_started:
            return  # bytes from an earlier attempt; the connection for the rest is not open yet
        bar.start()  # has an effect only the first time
        bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

    try:
        yield Patience(retries, say=lambda line: say(redact(line), err=True), show=show)
    finally:
        bar.stop()


# ----------------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def reading() -> Generator[Callable[[str, float], None]]:
    """Yield the callback for the progress of a run until its first step: (what is made, the share that is done)."""
    from dualtune.train.objectives.comparison import REFERENCE
    from dualtune.train.prepare import DOWNLOAD, FINGERPRINT, UNPACKED

    verbs = {
        DOWNLOAD: ("checking", "checked"), UNPACKED: ("unpacking", "unpacked"), REFERENCE: ("computing", "computed"),
    }  # fmt: skip
    with phases() as shown:
        shown.begin("checking", "model and data")
        reading: str | None = None

        def show(name: str, share: float) -> None:
            nonlocal reading
            if name == FINGERPRINT:
                return shown.begin(*(("checking", "model and data") if share else ("computing", name)))
            if name != reading:
                shown.begin(verbs.get(name, ("tokenizing",))[0], name)
                reading = name
            shown.update(share, 1)
            if share == 1.0:
                shown.finish(verbs.get(name, ("", "tokenized"))[1])
                shown.begin("checking", "model and data")
                reading = None  # a directory may be read twice, for training and for evaluation
            return None

        yield show


@contextlib.contextmanager
def progress_hook(config: Config, backend: Backend) -> Generator[Progress]:
    """Yield a hook that shows a run, from the loading of the model to the saved adapter."""
    with phases() as shown:
        every = config.run.eval_every, config.run.save_every
        view = RunView(*every, backend.memory, config.memory.limit_bytes)
        hook = Progress(config.run.log_every, shown, view, is_whole=config.adapter.method == "full")
        yield hook
        if hook.is_saving:  # False if the run ended before
            shown.finish("saved")
        shown.panel = ()


class Progress(RunLines):
    """Says the lines of a run; on a terminal the live line and the state of the run stand below them."""

    def __init__(self, log_every: int, shown: Phases, view: RunView, *, is_whole: bool = False) -> None:
        """`is_whole`: the run trains the whole model, not an adapter."""
        super().__init__(view, log_every, self._tell)
        self.is_saving = False
        self._result = "the model" if is_whole else "the adapter"
        self._shown = shown
        self._phase: str | None = None  # of predictive training
        self._began, self._drawn = 0.0, -math.inf

    def begin_loading(self, run: RunConfig) -> None:
        """Begin to show a prepared run; its intervals may be others than those of its config file."""
        self.adopt(run)
        self._shown.begin("loading", "the model")

    def on_start(self, info: RunInfo) -> None:
        self._shown.finish("loaded")
        self._began = time.monotonic()
        super().on_start(info)
        self._show_training()

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        if record.step == self.view.num_steps:
            self._show_saving()
        elif self._is_due():
            self._show_training()

    def step_line(self, fields: Fields) -> str:
        """Return the line of some steps; on a terminal what fits, since the live line shows the time left."""
        return fitted(fields, width()) if self._shown.is_live else super().step_line(fields)

    def after_step(self, step: StepTaken) -> None:
        self._phase = step.phase

    def on_eval_batch(self, done: int, total: int) -> None:
        if not done:
            self._shown.begin("evaluating")
        self._shown.update(done, total)
        if self._is_due():
            self._draw()

    def on_eval(self, record: EvalRecord) -> None:
        super().on_eval(record)
        self._show_rest()

    def on_sample(self, record: SampleRecord) -> None:
        super().on_sample(record)
        self._draw()

    def on_phase_change(self, change: PhaseChange) -> None:
        super().on_phase_change(change)
        if change.phase == SAMPLES:
            self._shown.begin("answering")
        elif change.before == SAMPLES:
            self._show_rest()
        elif change.phase == FINGERPRINTS:
            self._shown.begin("computing", f"the fingerprints of {self._result}")
        elif change.phase == RESULT:
            self._show_saving()
        elif change.phase == TRACKERS:
            self._shown.finish("saved")
            self.is_saving = False
            self._shown.begin("sending", "the last rows to the trackers")

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if event.event in ("early_stop", "verdict"):  # after the last samples, no phase follows
            self._show_saving()

    def _show_rest(self) -> None:
        if self.is_saving:
            self._show_saving()
        else:
            self._show_training()

    def _show_training(self) -> None:
        self._shown.begin("training", since=self._began)
        if record := self.view.last:
            phase = ((self._phase,),) if self._phase else ()
            numbers = (f"loss {record.loss:.4f}",), (f"{record.tokens_per_s:,.0f} tokens/s",), *phase
            left = self.view.seconds_left
            self._shown.update(record.step, self.view.num_steps, *numbers, seconds_left=left or 0.0)
        else:
            self._shown.update(self.view.step, self.view.num_steps)
        self._draw()

    def _show_saving(self) -> None:
        self.is_saving = True
        self._shown.begin("saving", self._result)
        self._draw()

    def _is_due(self) -> bool:
        """Return whether the terminal has shown what was drawn last: a short step is not worth a drawing of its own."""
        return time.monotonic() - self._drawn >= 1 / REFRESH_HZ

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._shown.is_live:
            self.view.measure()
            self._shown.panel = tuple(panel(self.view, width(), self.view.clock()))

    def _tell(self, line: str) -> None:
        self._shown.tell(line, self.view.clock())
