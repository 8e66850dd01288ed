"""Hooks: how progress bars, profilers and trackers watch a run.

A hook subclasses `Hook` and overrides the events that it wants. Records are immutable and hold plain numbers; only a
hook with `on_gradients` is shown tensors.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtune.base.errors import DualtuneError
from dualtune.base.plugins import points_of

if TYPE_CHECKING:
    from dualtune.engine.backend import Batch, Engine
    from dualtune.model.adapter import Tensors


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Known before the first step."""

    run_dir: Path
    backend: str
    num_steps: int
    first_step: int  # steps done before a resume; 0 for a new run
    num_train_documents: int
    num_eval_documents: int
    engine: Mapping[str, Any]
    checkpoint_bytes: int  # on disk, each


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step: a row of metrics.jsonl."""

    step: int  # counted from 1
    epoch: float
    loss: float  # mean over the step's target tokens, or the value of an objective that compares answers
    lr: float
    grad_norm: float  # before clipping
    num_targets: int
    num_tokens: int  # without padding
    step_s: float
    tokens_per_s: float
    documents_per_min: float
    peak_bytes: int
    skipped: bool  # loss or gradient was not finite, so nothing was updated
    metrics: Mapping[str, float] = field(default_factory=lambda: {})  # of an objective that compares answers, by name


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """An evaluation, the same in all processes."""

    step: int
    eval_loss: float  # mean over the target tokens of the evaluation set, or the value of such an objective
    eval_targets: int
    metrics: Mapping[str, float] = field(default_factory=lambda: {})  # as in StepRecord, with eval_ before the names
    failures: Sequence[str] = ()  # of rewards: an event each


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A greedy answer to a prompt of run.sample_prompts, given at an evaluation: a row of samples.jsonl."""

    step: int  # steps done
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Event:
    """An unusual event: a row of metrics.jsonl with the key `event` and the details as further keys."""

    step: int  # steps done
    event: (
        str  # resumed, config_changed, skipped_step, spike, rollback, save_failed, hook_failed, early_stop, verdict, …
    )
    message: str
    details: Mapping[str, Any] = field(default_factory=lambda: {})


# The phases between steps, by the names in PhaseChange. After the last step come FINGERPRINTS, which say what the
# result computes, RESULT, in which it is written, and TRACKERS.
EVALUATION, SAMPLES, SAVE, TRACKERS = "evaluation", "samples", "save", "trackers"
FINGERPRINTS, RESULT = "fingerprints", "result"


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The run leaves one phase and begins the next.

    The phases: data, micro-batch (all of a step, forward and backward), optimizer, probe (forward passes of predictive
    training, to decide by), evaluation, samples, save; trackers, at the end, with run.track.
    """

    step: int  # in the phases of a step, that step, counted from 1; in evaluation, samples and save, the steps done
    phase: str  # that begins
    before: str | None  # that ends; None at the first one


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of this process that is about to be computed, or has just been queued on the device."""

    step: int  # counted from 1
    index: int  # in the step, from 0; a step that is taken again begins again with 0
    num_tokens: int  # without padding
    num_targets: int


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step whose update has been queued; its loss is known one step later, in its `StepRecord`."""

    step: int  # counted from 1
    num_tokens: int  # over all processes; 0 if the step policy made no update
    num_targets: int
    lr: float | None  # None: no update
    phase: str | None = None  # of predictive training: warmup, full, predict or correct


class GradientView:
    """The adapter of a step between its last backward pass and its update, to look at.

    The tensors are read-only copies, by the names of the engine's adapter, made when they are first asked for: that
    waits for the device and moves as many float32 numbers as there are trained parameters. Nobody else pays for it.
    """

    def __init__(self, step: int, engine: Engine) -> None:
        self.step = step  # counted from 1; a step that is taken again is shown again
        self.engine = engine

    @cached_property
    def gradients(self) -> Tensors:
        """The gradient of the step's loss: of this process's micro-batches, before clipping."""
        return _read_only(self.engine.gradient())

    @cached_property
    def weights(self) -> Tensors:
        """The trained parameters before the update."""
        return _read_only(self.engine.adapter_state())


def _read_only(tensors: Tensors) -> Tensors:
    for array in tensors.values():
        array.setflags(write=False)
    return tensors


class Hook:
    """Base class of hooks: override what you need; the rest does nothing.

    There are two kinds of events. Records, such as `on_step`, say what has happened. Moments (`before_forward`,
    `after_backward`, `on_gradients`, `after_step`, `on_phase_change`) are called in the middle of the work, so they
    must be short; they cost nothing if no hook overrides them.

    A hook that raises does not end the run, and the failure is reported once. The records that it missed are delivered
    again, in order, before the next one. A missed moment has passed and is not repeated; while records wait, the hook
    gets no moments. (Only a non-`Exception`, such as KeyboardInterrupt, ends the run.) See docs/hooks.md.
    """

    def on_start(self, info: RunInfo) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...

    def on_eval_batch(self, done: int, total: int) -> None:
        """Called when an evaluation begins, with 0 done, and after each of its micro-batches."""

    def on_eval(self, record: EvalRecord) -> None: ...

    def on_sample(self, record: SampleRecord) -> None:
        """Called after each answer to a prompt of run.sample_prompts."""

    def on_event(self, event: Event) -> None: ...

    def on_end(self) -> None:
        """Called once, at the end, whether the run succeeded or failed."""

    def on_phase_change(self, change: PhaseChange) -> None:
        """Called between two phases. The last phase of a run ends with `on_end`."""

    def before_forward(self, micro_batch: MicroBatch) -> None: ...

    def after_backward(self, micro_batch: MicroBatch) -> None:
        """Called when the host has queued the backward pass. The device may still compute it."""

    def on_gradients(self, view: GradientView) -> None:
        """Called before each update, with the whole gradient of the step."""

    def after_step(self, step: StepTaken) -> None: ...


HOOKS_GROUP = "dualtune.train.hooks"
MOMENTS = ("on_phase_change", "before_forward", "after_backward", "on_gradients", "after_step")


def installed_hooks() -> tuple[list[Hook], list[str]]:
    """Return a hook for each entry point of the group `dualtune.train.hooks`, by name, and why others cannot be used.

    An entry point names a callable without arguments that returns a `Hook`, such as a subclass.
    """
    hooks: list[Hook] = []
    problems: list[str] = []
    for point in sorted(points_of(HOOKS_GROUP), key=lambda point: (point.name, point.value)):
        try:
            hook = point.load()()
        except Exception as error:  # noqa: BLE001  foreign code must not end a run
            problems.append(f"the hook '{point.name}' ({point.value}) is not used: {type(error).__name__}: {error}")
            continue
        if isinstance(hook, Hook):
            hooks.append(hook)
        else:
            problems.append(
                f"the hook '{point.name}' ({point.value}) is not used: it is a {type(hook).__name__}, it must be a "
                "subclass of dualtune.train.hooks.Hook"
            )
    return hooks, problems


# ----------------------------------------------------------------------------------------------------------------------
# Calls the hooks of a run in such a way that none of them can end it.

MAX_QUEUED = 10_000  # events kept for a failing hook, such as a tracker without network


@dataclass(slots=True)
class _Watcher:
    hook: Hook
    missed: deque[tuple[str, tuple[Any, ...]]] = field(default_factory=lambda: deque(maxlen=MAX_QUEUED))
    failing: set[str] = field(default_factory=lambda: set[str]())  # the events that fail, and were reported


class Watchers:
    """Calls hooks in the given order, and `report(message)` when one starts to fail. Never synchronizes the device."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._watchers = [_Watcher(hook) for hook in hooks]
        self._listeners = {  # the hooks that override a moment
            moment: [w for w in self._watchers if getattr(type(w.hook), moment) is not getattr(Hook, moment)]
            for moment in MOMENTS
        }
        self.report: Callable[[str], None] = lambda message: None
        self._phase: str | None = None

    def tell(self, event: str, *args: Any) -> None:
        """Call the method `event` of every hook, after what the hook has missed."""
        for watcher in self._watchers:
            watcher.missed.append((event, args))
            self._report(_deliver(watcher))

    def enter(self, step: int, phase: str) -> contextlib.AbstractContextManager[None]:
        """Tell that a phase begins, and that the one before ends. Return a block for what is done in it."""
        change, self._phase = PhaseChange(step, phase, self._phase), phase
        self.tell_now("on_phase_change", change)
        return contextlib.nullcontext()

    def watched(self, step: int, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the micro-batches of a step, counted from 1; hooks hear of each one, if any of them wants to."""
        listens = self._listeners["before_forward"] or self._listeners["after_backward"]
        return self._each(step, batches) if listens else batches

    def _each(self, step: int, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. The caller asks for the next when it has queued the backward pass of the one before."""
        for index, batch in enumerate(batches):
            micro_batch = MicroBatch(step, index, batch.num_tokens, batch.num_targets)
            self.tell_now("before_forward", micro_batch)
            yield batch
            self.tell_now("after_backward", micro_batch)

    def show_gradients(self, step: int, engine: Engine) -> None:
        """Show the gradient of a step, counted from 1, before its update."""
        self.tell_now("on_gradients", GradientView(step, engine))

    def tell_now(self, moment: str, *args: Any) -> None:
        """Call the method `moment` of the hooks that override it. A hook that fails misses it for good."""
        for watcher in self._listeners[moment]:
            self._report(_deliver(watcher))
            if not watcher.missed:
                self._report(_call(watcher, moment, args))

    def end(self) -> None:
        """Tell every hook that the run is over, also those that have missed something for good."""
        for watcher in self._watchers:
            _deliver(watcher)
            watcher.missed.clear()
        self.tell("on_end")

    def _report(self, problem: str | None) -> None:
        if problem:
            self.report(problem)


def _deliver(watcher: _Watcher) -> str | None:
    """Deliver the queued events to a hook. Return the error message if it has just started to fail."""
    while watcher.missed:
        event, args = watcher.missed.popleft()
        problem = _call(watcher, event, args)
        if event in watcher.failing:
            watcher.missed.appendleft((event, args))
            return problem
    return None


def _call(watcher: _Watcher, event: str, args: tuple[Any, ...]) -> str | None:
    """Call a hook, and note whether it fails. Return the error message if this event has just started to fail."""
    try:
        getattr(watcher.hook, event)(*args)
    except Exception as error:  # noqa: BLE001  foreign code must not end a run of days
        if event in watcher.failing:
            return None
        watcher.failing.add(event)
        later = "such moments are not repeated" if event in MOMENTS else "the events that it misses are delivered later"
        problem = f"{type(watcher.hook).__name__}.{event} raised {type(error).__name__}: {error}"
        problem = str(error) if isinstance(error, DualtuneError) else problem  # one of ours is written for people
        return problem if event == "on_end" else f"{problem}. Training continues; {later}"
    if event not in MOMENTS:  # of which there are thousands: only the first failure is reported
        watcher.failing.discard(event)
    return None
