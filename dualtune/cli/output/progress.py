"""What `dualtune train` shows: the phases of the run, and a line every `log_every` steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from dualtune.cli.output.screen import Phases, phases, width
from dualtune.hooks import EvalRecord, Event, Hook, RunInfo, StepRecord, StepTaken
from dualtune.text.show import fitted, in_bytes, in_time


@contextlib.contextmanager
def reading() -> Generator[Callable[[str, float], None]]:
    """Yield the callback for the progress of `prepare`: (what is tokenized, the share that is done)."""
    with phases() as shown:
        shown.begin("checking", "model and data")
        tokenizing: str | None = None

        def show(what: str, share: float) -> None:
            nonlocal tokenizing
            if what != tokenizing:
                shown.begin("tokenizing", what)
                tokenizing = what
            shown.update(share, 1)
            if share == 1.0:
                shown.finish("tokenized")
                shown.begin("checking", "model and data")
                tokenizing = None  # a directory may be read twice, for training and for evaluation

        yield show


@contextlib.contextmanager
def progress_hook(log_every: int) -> Generator[Progress]:
    """Yield a hook that shows a run, from the loading of the model to the saved adapter."""
    with phases() as shown:
        hook = Progress(log_every, shown)
        yield hook
        if hook.is_saving:  # False if the run ended before
            shown.finish("saved")


class Progress(Hook):
    """Prints a line every `log_every` steps, with the mean loss since the last line; below them, the progress."""

    def __init__(self, log_every: int, shown: Phases) -> None:
        self.is_saving = False
        self._result = "the adapter"
        self._log_every = log_every
        self._shown = shown
        self._since: list[StepRecord] = []
        self._last: StepRecord | None = None
        self._phase: str | None = None  # of predictive training
        self._num_steps = self._done = 0
        self._seconds = self._began = 0.0

    def begin_loading(self) -> None:
        self._shown.begin("loading", "the model")

    def on_start(self, info: RunInfo) -> None:
        self._shown.finish("loaded")
        self._num_steps, self._began = info.num_steps, time.monotonic()
        engine = info.engine
        if engine["trainable_parameters"] == engine["num_parameters"]:
            self._result = "the model"
        self._shown.tell(
            f"engine      {info.backend} on {engine['device']}, {engine['dtype']} ({engine['dtype_reason']}), "
            f"quantization {engine['quantization']} ({engine['quantization_reason']}), "
            f"{engine['trainable_parameters']:,} of {engine['num_parameters']:,} parameters trained"
        )
        if engine["quantization"] != "none" and (weights := engine.get("adapted_weights")) and weights["parameters"]:
            bytes_each = weights["bytes"] / weights["parameters"]
            self._shown.tell(f"base        {bytes_each:.3f} bytes a weight in the adapted layers, with all scales")
        if kernels := engine.get("kernels"):
            self._shown.tell(f"kernels     {kernels}")
        if engine.get("sharding") == "full":
            self._shown.tell(f"sharding    the base is split among the processes: {engine['sharding_reason']}")
        if (recomputed := engine.get("checkpointing", "none")) != "none":
            self._shown.tell(f"memory      {recomputed} ({engine['checkpointing_reason']})")
        if streaming := engine.get("streaming"):
            self._shown.tell(
                f"streaming   {streaming['resident_layers']} of {streaming['layers']} layers on the device "
                f"({in_bytes(streaming['resident_bytes'])}), all on the host ({in_bytes(streaming['host_bytes'])})"
            )
        self._shown.tell(f"checkpoints {in_bytes(info.checkpoint_bytes)} each, in {info.run_dir / 'checkpoints'}")
        self._show_training()

    def on_step(self, record: StepRecord) -> None:
        self._since.append(record)
        self._done += 1
        self._seconds += record.step_s
        self._last = record
        is_last = record.step == self._num_steps
        if record.step % self._log_every == 0 or is_last:
            self._tell_steps(record)
        if is_last:
            self._show_saving()
        else:
            self._show_training()

    def after_step(self, step: StepTaken) -> None:
        self._phase = step.phase

    def on_eval_batch(self, done: int, total: int) -> None:
        if not done:
            self._shown.begin("evaluating")
        self._shown.update(done, total)

    def on_eval(self, record: EvalRecord) -> None:
        self._shown.tell(
            f"eval   {record.step:>6}  loss {record.eval_loss:.4f} over {record.eval_targets} target tokens "
            f"in {self._shown.seconds:.1f} s"
        )
        if self.is_saving:
            self._show_saving()
        else:
            self._show_training()

    def on_event(self, event: Event) -> None:
        self._shown.tell(f"{event.event.replace('_', ' '):<11} {event.message}")
        if event.event == "early_stop":
            self._show_saving()

    @property
    def _left(self) -> float:
        """Return the seconds of training left, by the mean of the steps so far."""
        step = self._last.step if self._last else self._num_steps
        return self._seconds / max(1, self._done) * (self._num_steps - step)

    def _show_training(self) -> None:
        self._shown.begin("training", since=self._began)
        if record := self._last:
            phase = ((self._phase,),) if self._phase else ()
            numbers = (f"loss {record.loss:.4f}",), (f"{record.tokens_per_s:,.0f} tokens/s",), *phase
            self._shown.update(record.step, self._num_steps, *numbers, seconds_left=self._left)

    def _show_saving(self) -> None:
        self.is_saving = True
        self._shown.begin("saving", self._result)

    def _tell_steps(self, record: StepRecord) -> None:
        speed = sum(r.num_tokens for r in self._since) / sum(r.step_s for r in self._since)
        loss = sum(r.loss for r in self._since) / len(self._since)
        self._since.clear()
        digits = len(str(self._num_steps))
        fields = [
            (f"step   {record.step:>6}/{self._num_steps}", f"step {record.step:>{digits}}/{self._num_steps}"),
            (f"loss {loss:.4f}",),
            (f"lr {record.lr:.2e}", f"lr {record.lr:.1e}"),
            (f"grad norm {record.grad_norm:.2e}", f"grad {record.grad_norm:.1e}"),
            (f"{speed:,.0f} tokens/s", f"{speed:,.0f} tok/s"),
            (f"peak {record.peak_bytes / 2**30:.2f} GiB",),
        ]
        if self._shown.is_live:  # the live line shows the time left
            return self._shown.tell(fitted(fields, width()))
        return self._shown.tell("  ".join([*(forms[0] for forms in fields), f"{in_time(self._left)} left"]))
