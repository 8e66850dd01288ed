"""Tells the hooks of a run in which phase it is, and what happens around each micro-batch and step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypedDict

from dualtune.engine.backend import Batch
from dualtune.train.hooks import MicroBatch, PhaseChange, StepTaken, Watchers
from dualtune.train.policy import Outcome
from dualtune.train.step import Phase, Watch, untimed, unwatched


class Watched(TypedDict):
    """What a `TrainingStep` calls on its way."""

    phase: Phase
    watch: Watch


class Moments:
    """Calls only the hooks that listen, and does nothing where none does. Nothing here synchronizes the device."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers
        self._phase: str | None = None
        self._phases_are_watched = watchers.listen_to("on_phase_change")
        self._batches_are_watched = watchers.listen_to("before_forward", "after_backward")

    def enter(self, step: int, phase: str) -> None:
        """Tell that a phase begins, and that the one before ends."""
        if self._phases_are_watched:
            change, self._phase = PhaseChange(step, phase, self._phase), phase
            self._watchers.tell_now("on_phase_change", change)

    def of_step(self, step: int) -> Watched:
        """Return what watches a step, counted from 1."""

        def begin(phase: str) -> contextlib.AbstractContextManager[None]:
            self.enter(step, phase)
            return contextlib.nullcontext()

        def watch(batches: Iterable[Batch]) -> Iterator[Batch]:
            return self._watch(step, batches)

        return {
            "phase": begin if self._phases_are_watched else untimed,
            "watch": watch if self._batches_are_watched else unwatched,
        }

    def step_taken(self, step: int, outcome: Outcome) -> None:
        if not self._watchers.listen_to("after_step"):
            return
        if (update := outcome.update) is None:
            taken = StepTaken(step, num_tokens=0, num_targets=0, lr=None, phase=outcome.phase)
        else:
            taken = StepTaken(step, update.num_tokens, update.num_targets, update.lr, outcome.phase)
        self._watchers.tell_now("after_step", taken)

    def _watch(self, step: int, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. The caller asks for the next when it has queued the backward pass of the one before."""
        for index, batch in enumerate(batches):
            micro_batch = MicroBatch(step, index, batch.num_tokens, batch.num_targets)
            self._watchers.tell_now("before_forward", micro_batch)
            yield batch
            self._watchers.tell_now("after_backward", micro_batch)
