"""What a step policy is given, what it returns, and what it remembers between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dualtune.engine.backend import Engine, StepOutput
from dualtune.model.adapter import Tensors
from dualtune.train.hooks import Event


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer update: its results, still on the device, and the other fields of its row in metrics.jsonl."""

    output: StepOutput
    lr: float
    num_targets: int  # over all processes, like num_tokens
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=lambda: {})  # of an objective that compares answers


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a policy's step."""

    update: Update | None  # None: no optimizer update in this step, and no row
    num_steps: int = 1  # steps of data and schedule that it covers, from 1 to `StepActions.max_steps`
    events: tuple[Event, ...] = ()
    phase: str | None = None  # of the policy, to show it; None: it has none
    must_save: bool = False  # the step has decided by what a resumed run could not know: save before the next one


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The state of a policy between steps. The state of a new policy is empty, and an empty state is not stored."""

    values: Mapping[str, Any] = field(default_factory=lambda: {})  # JSON
    tensors: Tensors = field(default_factory=lambda: {})

    @property
    def is_empty(self) -> bool:
        return not (self.values or self.tensors)


class StepActions(Protocol):
    """What a policy may do in one step: the part of `dualtune.train.step.TrainingStep` that no policy goes beyond.

    Every slow action raises Preempted if a signal requests a stop; a policy must not catch it.
    """

    @property
    def engine(self) -> Engine: ...

    @property
    def index(self) -> int:
        """The steps done before this one."""
        ...

    @property
    def max_steps(self) -> int:
        """The steps that this one may cover: until the next checkpoint, evaluation or the end."""
        ...

    @property
    def steps_left(self) -> int:
        """The steps until the end of the run, with this one."""
        ...

    @property
    def probe_documents(self) -> Sequence[int]:
        """The training documents that are held out for the policy."""
        ...

    def add_gradients(self) -> None: ...

    def update(self) -> Update: ...

    def rate(self, ahead: int = 0) -> float:
        """Return the learning rate that the schedule has `ahead` steps after this one; before it, if negative."""
        ...

    def tokens_of(self, documents: Sequence[int]) -> int:
        """Return the number of tokens of these training documents."""
        ...

    def document_losses(self, documents: Sequence[int]) -> np.ndarray:
        """Return the mean of −w·log p over each document's targets, float64 [documents], without dropout.

        The same numbers in all processes, in the given order, however the documents lie in micro-batches. Synchronizes.
        """
        ...

    def from_first(self, number: float) -> float:
        """Return the first process's number in all processes, so that they decide alike. All must call it."""
        ...

    def trying(self, adapter: Tensors) -> contextlib.AbstractContextManager[None]:
        """Use other adapter weights inside the block, and always restore the engine's own at its end."""
        ...


class StepPolicy(Protocol):
    """Decides what each step does. It is created from the config.

    A resumed run must decide like the uninterrupted one, and all processes must decide alike. So a decision may depend
    only on the step, the state, and numbers that are equal in all processes (`StepOutput`, those of `StepActions`;
    `Engine.gradient` is this process's own).
    Read what a step queued on the device in the next step: then nothing waits (docs/decisions/0006).
    """

    name: str  # as in the table of `train/policies.py`
    num_probes: int  # documents to hold out from the training data

    def take(self, step: Any, /) -> Outcome:
        """Take one step (a `StepActions`), and leave no gradient behind.

        If it raises, adapter, optimizer and state must be as they were before: the run saves them, and the resumed run
        repeats the step.
        """
        ...

    def state(self) -> PolicyState: ...

    def load_state(self, state: PolicyState, /) -> None:
        """Continue from a state, after a rollback from an earlier one. An empty state is that of a new policy.

        ValueError if the state does not belong to this policy.
        """
        ...
