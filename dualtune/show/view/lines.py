"""The lines of a run: on the screen, in a pipe, and in log.txt."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from dualtune.base.errors import FormatError
from dualtune.base.fields import shown
from dualtune.base.files import open_own
from dualtune.base.text import cut, fitted, in_bytes, in_time, one_line, stamped, visible
from dualtune.config.schema import RunConfig
from dualtune.show.view.run_view import RunView
from dualtune.train.hooks import EVALUATION, EvalRecord, Event, Hook, PhaseChange, RunInfo, SampleRecord, StepRecord

Fields = Sequence[tuple[str, ...]]  # the numbers of a line, each in several forms from long to short
MAX_SAMPLE = 400  # characters of a prompt or an answer
MAX_WAITING = 1 << 20  # characters that a full disk has refused
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class RunLines(Hook):
    """Says a line for each event, evaluation and sample, and every `log_every` steps one with their mean loss."""

    def __init__(self, view: RunView, log_every: int, say: Callable[[str], None]) -> None:
        self.view = view
        self._log_every, self._say = log_every, say
        self._since: list[StepRecord] = []

    def adopt(self, run: RunConfig) -> None:
        """Take the intervals of a prepared run, which may be others than those of its config file."""
        self._log_every, self.view.eval_every = run.log_every, run.eval_every

    def on_start(self, info: RunInfo) -> None:
        self.view.on_start(info)
        for line in started(info):
            self._say(line)

    def on_step(self, record: StepRecord) -> None:
        self.view.on_step(record)
        self._since.append(record)
        if record.step % self._log_every == 0 or record.step == self.view.num_steps:
            self._say(self.step_line(step_fields(self._since, self.view)))
            self._since.clear()

    def step_line(self, fields: Fields) -> str:
        """Return the line of some steps; a pipe and a file get every number, and the time left."""
        seconds = self.view.seconds_left
        return "  ".join([*(forms[0] for forms in fields), *([] if seconds is None else [f"{in_time(seconds)} left"])])

    def on_eval(self, record: EvalRecord) -> None:
        self.view.on_eval(record)
        took = f" in {in_time(self.view.clock() - self.view.began, 1)}" if self.view.phase == EVALUATION else ""
        compared = f", {answers}" if (answers := answers_in_words(record.metrics)) else ""
        over = f"over {record.eval_targets} target tokens"
        self._say(f"eval   {record.step:>6}  loss {record.eval_loss:.4f} {over}{compared}{took}")

    def on_sample(self, record: SampleRecord) -> None:
        self.view.on_sample(record)
        prompt, answer = (one_line(text)[:MAX_SAMPLE] for text in (record.prompt, record.answer))
        self._say(f"sample {record.step:>6}  {prompt} → {answer}")

    def on_event(self, event: Event) -> None:
        self.view.on_event(event)
        self._say(f"{event.event.replace('_', ' '):<11} {event.message}")

    def on_phase_change(self, change: PhaseChange) -> None:
        self.view.on_phase_change(change)

    def on_end(self) -> None:
        self.view.on_end()


def answers_in_words(metrics: Mapping[str, float]) -> str:
    """Say what an evaluation measured beside the loss of sft, of answers or of a teacher; empty where it did not."""
    forms = {
        "eval_reward_accuracy": "{:.1%} of pairs in the right order", "eval_reward_margin": "margin {:.3f}",
        "eval_kl": "KL {:.2f}", "eval_reward": "reward {:.3f}", "eval_divergence": "divergence {:.4f}",
    }  # fmt: skip
    return ", ".join(form.format(metrics[name]) for name, form in forms.items() if name in metrics)


class RunLog(RunLines):
    """Writes the lines of a run to its log.txt, each with its time. A resumed run continues the file.

    What a full disk refuses is written later. A log that could not be written to the end is reported there.
    """

    def __init__(self, path: Path, view: RunView, log_every: int, first: Sequence[str] = ()) -> None:
        """`first`: the lines from before the model was loaded."""
        super().__init__(view, log_every, self._note)
        self._path, self._first = path, first
        self._file: int | None = None
        self._waiting = ""

    def on_start(self, info: RunInfo) -> None:
        self._file = open_own(self._path, _FLAGS)
        for line in self._first:
            self._note(line)
        super().on_start(info)

    def on_end(self) -> None:
        super().on_end()
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            if self._waiting:
                os.write(file, self._waiting.encode())
        finally:
            os.close(file)

    def _note(self, line: str) -> None:
        self._waiting = (self._waiting + stamped(visible(line), self.view.clock()) + "\n")[-MAX_WAITING:]
        if self._file is None:
            return
        try:
            written = os.write(self._file, self._waiting.encode())
        except OSError:
            return
        self._waiting = self._waiting.encode()[written:].decode(errors="replace")


def log_result(path: Path, kind: str, result: Path) -> None:
    """Add where the result of a run is to its log, which is closed by then. On a full disk the line is lost."""
    with suppress(OSError, FormatError), os.fdopen(open_own(path, _FLAGS), "ab") as file:
        file.write((stamped(visible(f"{kind:<11} {result}"), time.time()) + "\n").encode())


def step_fields(since: Sequence[StepRecord], view: RunView) -> Fields:
    """Return the numbers of the last steps: the mean loss and speed, and the rest of the last one."""
    record = since[-1]
    speed = sum(r.num_tokens for r in since) / (sum(r.step_s for r in since) or 1.0)
    loss, of = sum(r.loss for r in since) / len(since), view.num_steps
    return [
        (f"step   {record.step:>6}/{of}", f"step {record.step:>{len(str(of))}}/{of}"),
        (f"loss {loss:.4f}",),
        (f"lr {record.lr:.2e}", f"lr {record.lr:.1e}"),
        (f"grad norm {record.grad_norm:.2e}", f"grad {record.grad_norm:.1e}"),
        (f"{speed:,.0f} tokens/s", f"{speed:,.0f} tok/s"),
        (f"peak {record.peak_bytes / 2**30:.2f} GiB",),
    ]


def started(info: RunInfo) -> list[str]:
    """Return the lines before the first step."""
    engine = info.engine
    lines = [
        f"engine      {info.backend} on {engine['device']}, {engine['dtype']} ({engine['dtype_reason']}), "
        f"quantization {engine['quantization']} ({engine['quantization_reason']}), "
        f"{engine['trainable_parameters']:,} of {engine['num_parameters']:,} parameters trained"
    ]
    if weights := engine.get("adapted_weights"):
        share = weights["parameters"] / max(1, engine["num_parameters"])
        kind = f"; {engine['adapted_as']}" if engine.get("adapted_as") else ""
        lines.append(f"adapted     {weights['layers']} linear layers with {share:.0%} of the base's weights{kind}")
    if beside := engine.get("trained_beside"):
        lines.append("beside      " + ", ".join(f"{module}: {size:,} parameters" for module, size in beside.items()))
    if engine["quantization"] != "none" and (weights := engine.get("adapted_weights")) and weights["parameters"]:
        bytes_each = weights["bytes"] / weights["parameters"]
        lines.append(f"base        {bytes_each:.3f} bytes a weight in the adapted layers, with all scales")
    if kernels := engine.get("kernels"):
        lines.append(f"kernels     {kernels}")
    if engine.get("sharding") == "full":
        lines.append(f"sharding    the base is sharded among the processes: {engine['sharding_reason']}")
    if (recomputed := engine.get("checkpointing", "none")) != "none":
        lines.append(f"memory      {recomputed} ({engine['checkpointing_reason']})")
    if streaming := engine.get("streaming"):
        lines.append(
            f"streaming   {streaming['resident_layers']} of {streaming['layers']} layers on the device "
            f"({in_bytes(streaming['resident_bytes'])}), all on the host ({in_bytes(streaming['host_bytes'])})"
        )
    return [*lines, f"checkpoints {in_bytes(info.checkpoint_bytes)} each, in {info.run_dir / 'checkpoints'}"]


# ----------------------------------------------------------------------------------------------------------------------
# The numbers of a run as a few lines for a terminal.

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
