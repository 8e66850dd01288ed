"""What `dualtune train` shows: a line every `log_every` steps, and on a terminal progress bars below the lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
)
from rich.text import Text

from dualtune.cli.terminal import say
from dualtune.hooks import EvalRecord, Event, Hook, RunInfo, StepRecord
from dualtune.show import in_bytes


@contextlib.contextmanager
def reading() -> Generator[Callable[[str, float], None]]:
    """Yields what `prepare` tells its progress to: (what is tokenized, the share of it that is done).

    A line when it is done; on a terminal, a bar until then.
    """
    tasks: dict[str, tuple[TaskID, float]] = {}
    columns = (TextColumn("tokenizing {task.description}"), BarColumn(), TaskProgressColumn(), _TimeLeft())
    with Progress(*columns, console=Console(highlight=False), transient=True, disable=not sys.stdout.isatty()) as bar:

        def show(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0), time.monotonic()
            task, began = tasks[what]
            bar.update(task, completed=share)
            if share == 1.0:
                bar.remove_task(task)
                del tasks[what]  # a directory may be read twice, for training and for evaluation
                say(f"tokenized   {what} in {time.monotonic() - began:.1f} s")

        yield show


def progress_hook(log_every: int) -> Hook:
    return Bar(log_every) if sys.stdout.isatty() else Lines(log_every)


class Lines(Hook):
    """A line every `log_every` steps, with the mean loss since the last line."""

    def __init__(self, log_every: int, say: Callable[[str], None] = say) -> None:
        self._log_every = log_every
        self._say = say
        self._since: list[StepRecord] = []
        self._num_steps = self._done = 0
        self._seconds = 0.0

    def on_start(self, info: RunInfo) -> None:
        self._num_steps = info.num_steps
        engine = info.engine
        self._say(
            f"engine      {info.backend} on {engine['device']}, {engine['dtype']} ({engine['dtype_reason']}), "
            f"quantization {engine['quantization']} ({engine['quantization_reason']}), "
            f"{engine['trainable_parameters']:,} of {engine['num_parameters']:,} parameters trained"
        )
        if kernels := engine.get("kernels"):
            self._say(f"kernels     {kernels}")
        if engine.get("sharding") == "full":
            self._say(f"sharding    the base is split among the processes: {engine['sharding_reason']}")
        self._say(f"checkpoints {in_bytes(info.checkpoint_bytes)} each, in {info.run_dir / 'checkpoints'}")

    def on_step(self, record: StepRecord) -> None:
        self._since.append(record)
        self._done += 1
        self._seconds += record.step_s
        if record.step % self._log_every and record.step != self._num_steps:
            return
        rate = sum(r.num_tokens for r in self._since) / sum(r.step_s for r in self._since)
        loss = sum(r.loss for r in self._since) / len(self._since)
        self._since.clear()
        left = self._seconds / self._done * (self._num_steps - record.step)
        self._say(
            f"step   {record.step:>6}/{self._num_steps}  loss {loss:.4f}  lr {record.lr:.2e}  "
            f"grad norm {record.grad_norm:.2e}  {rate:,.0f} tokens/s  peak {record.peak_bytes / 2**30:.2f} GiB  "
            f"{left:.0f} s left"
        )

    def on_eval(self, record: EvalRecord) -> None:
        self._say(f"eval   {record.step:>6}  loss {record.eval_loss:.4f} over {record.eval_targets} target tokens")

    def on_event(self, event: Event) -> None:
        self._say(f"{event.event.replace('_', ' '):<11} {event.message}")


class Bar(Hook):
    """The lines, and below them a bar with the last loss, tokens per second and the time left."""

    def __init__(self, log_every: int) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            _TimeLeft(),
            console=Console(highlight=False),
        )
        self._lines = Lines(log_every, self._progress.console.print)
        self._task = self._progress.add_task("training", numbers="")

    def on_start(self, info: RunInfo) -> None:
        self._lines.on_start(info)
        self._progress.update(self._task, total=info.num_steps, completed=info.first_step)
        self._progress.start()

    def on_step(self, record: StepRecord) -> None:
        self._lines.on_step(record)
        numbers = f"loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._task, completed=record.step, numbers=numbers)

    def on_eval(self, record: EvalRecord) -> None:
        self._lines.on_eval(record)

    def on_event(self, event: Event) -> None:
        self._lines.on_event(event)

    def on_end(self) -> None:
        self._progress.stop()


class _TimeLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.time_remaining is None else f"{task.time_remaining:.0f} s left")
