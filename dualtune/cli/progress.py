"""What `dualtune train` shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from dualtune.hooks import EvalRecord, Hook, RunInfo, StepRecord


def progress_hook(log_every: int) -> Hook:
    return Bar(log_every) if sys.stdout.isatty() else Lines(log_every)


def engine_line(info: RunInfo) -> str:
    engine = info.engine
    return (
        f"engine      {info.backend} on {engine['device']}, {engine['dtype']} ({engine['dtype_reason']}), "
        f"quantization {engine['quantization']} ({engine['quantization_reason']}), "
        f"{engine['trainable_parameters']:,} of {engine['num_parameters']:,} parameters trained"
    )


def eval_line(record: EvalRecord) -> str:
    return f"eval   {record.step:>6}  loss {record.eval_loss:.4f} over {record.eval_targets} target tokens"


class Lines(Hook):
    """A line every `log_every` steps, with the mean loss since the last line."""

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._since: list[StepRecord] = []
        self._num_steps = self._done = 0
        self._seconds = 0.0

    def on_start(self, info: RunInfo) -> None:
        self._num_steps = info.num_steps
        self._say(engine_line(info))
        if info.first_step:
            self._say(f"resumed     after step {info.first_step}")

    def on_step(self, record: StepRecord) -> None:
        self._since.append(record)
        self._done += 1
        self._seconds += record.step_s
        if record.step % self._log_every and record.step != self._num_steps:
            return
        seconds = sum(r.step_s for r in self._since)
        rate = sum(r.num_tokens for r in self._since) / seconds
        loss = sum(r.loss for r in self._since) / len(self._since)
        self._since.clear()
        left = self._seconds / self._done * (self._num_steps - record.step)
        self._say(
            f"step   {record.step:>6}/{self._num_steps}  loss {loss:.4f}  lr {record.lr:.2e}  "
            f"grad norm {record.grad_norm:.2e}  {rate:,.0f} tokens/s  peak {record.peak_bytes / 2**30:.2f} GiB  "
            f"{left:.0f} s left"
        )

    def on_eval(self, record: EvalRecord) -> None:
        self._say(eval_line(record))

    def _say(self, line: str) -> None:
        print(line, flush=True)


class Bar(Hook):
    """A progress bar with the last loss, tokens per second and the time left."""

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._console = Console()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            _TimeLeft(),
            console=self._console,
        )
        self._task = self._progress.add_task("training", start=False, numbers="")

    def on_start(self, info: RunInfo) -> None:
        self._console.print(engine_line(info), highlight=False)
        self._progress.update(self._task, total=info.num_steps, completed=info.first_step)
        self._progress.start()
        self._progress.start_task(self._task)

    def on_step(self, record: StepRecord) -> None:
        numbers = f"loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._task, completed=record.step, numbers=numbers)

    def on_eval(self, record: EvalRecord) -> None:
        self._progress.print(eval_line(record), highlight=False)

    def on_end(self) -> None:
        self._progress.stop()


class _TimeLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.time_remaining is None else f"{task.time_remaining:.0f} s left")
