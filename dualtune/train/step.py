"""One step of a run: what happens in it, and the policy that decides what that is.

The training loop and `dualtune bench` take the same steps. Neither knows the policy: it is given a `TrainingStep`, uses
what that offers, and returns an `Outcome`. `policies.py` is the table of the policies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from dualtune import interrupt
from dualtune.adapter.spec import Tensors
from dualtune.backend import Batch, Engine, StepOutput
from dualtune.config import Config
from dualtune.hooks import Event, StepRecord
from dualtune.train.schedule import learning_rate

if TYPE_CHECKING:
    from dualtune.train.prepare import Prepared
    from dualtune.train.state.metrics import Metrics

DATA, GRADIENT, OPTIMIZER = "data", "forward and backward", "optimizer"  # the phases of a step
Phase = Callable[[str], contextlib.AbstractContextManager[None]]


def untimed(name: str) -> contextlib.AbstractContextManager[None]:
    """The phases of training: nothing is measured, and nobody waits for the device."""
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer update: its results, still on the device, and what else its row of metrics.jsonl says."""

    output: StepOutput
    lr: float
    num_targets: int  # of all processes, as num_tokens
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy did in a step."""

    update: Update | None  # None: the step made no optimizer update, and gets no row
    num_steps: int = 1  # steps of data and schedule that it stands for, from 1 to `TrainingStep.max_steps`
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a policy remembers from one step to the next. A new policy's is empty, and an empty one is not stored."""

    values: Mapping[str, Any] = field(default_factory=lambda: {})  # JSON
    tensors: Tensors = field(default_factory=lambda: {})

    @property
    def is_empty(self) -> bool:
        return not (self.values or self.tensors)


class TrainingStep:
    """What a policy can do in one step. The ordinary one calls `add_gradients`, then `update`.

    Whatever takes time raises Preempted if a signal asks for a stop; a policy lets it pass.
    """

    def __init__(
        self, prepared: Prepared, engine: Engine, index: int, make_batches: Callable[[int], list[Batch]], *,
        max_steps: int = 1, phase: Phase = untimed,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.index = index  # steps done before this one
        self.max_steps = max_steps  # that it can stand for: until the next checkpoint, evaluation or the end
        self._prepared, self._team = prepared, prepared.team
        self._make_batches, self._phase = make_batches, phase
        self._counted: tuple[float, int, int] | None = (
            None  # no cached_property: before Python 3.12 it waits with a lock
        )

    @cached_property
    def batches(self) -> list[Batch]:
        """The micro-batches of this step that this process computes. They are made when they are first used."""
        with self._phase(DATA):
            return self._make_batches(self.index)

    @cached_property
    def probes(self) -> list[Batch]:
        """This process's share of the documents that are held out from training for the policy."""
        return self._prepared.probe_batches()

    @property
    def learning_rate(self) -> float:
        """By the schedule, which stays at its last step where a benchmark takes more steps than a run."""
        num_steps = self._prepared.order.num_steps
        return learning_rate(self._prepared.config, min(self.index, num_steps - 1), num_steps)

    def add_gradients(self) -> None:
        """Add the gradient of the (weighted) mean loss over the step's targets, micro-batch by micro-batch."""
        weight, _, _ = self._totals()
        with self._phase(GRADIENT):
            for batch in self._until_stopped(self.batches):
                self.engine.forward_backward(batch, num_targets=weight)

    def update(self) -> Update:
        """Make the optimizer update with the gradient that was added."""
        _, num_targets, num_tokens = self._totals()
        lr = self.learning_rate
        self._team.check()
        with self._phase(OPTIMIZER):
            output = self.engine.optim_step(lr=lr, max_grad_norm=self._prepared.config.train.max_grad_norm)
        return Update(output, lr, num_targets, num_tokens)

    def mean_loss(self, batches: Iterable[Batch]) -> float:
        """The weighted mean of −log p over the targets of all processes' batches, without dropout. It synchronizes.

        Of `probes`, or of `batches` where a step only looks at its data.
        """
        found = [(self.engine.evaluate(batch), batch.total_weight) for batch in self._until_stopped(batches)]
        loss_sum, weight = self._team.total(sum(loss.loss_sum for loss, _ in found), sum(weight for _, weight in found))
        return loss_sum / weight

    @contextlib.contextmanager
    def trying(self, adapter: Tensors) -> Generator[None]:
        """Other adapter weights in place of the engine's, which come back at the end, whatever happens."""
        before = self.engine.adapter_state()
        self.engine.load_adapter_state(adapter)
        try:
            yield
        finally:
            self.engine.load_adapter_state(before)

    def _totals(self) -> tuple[float, int, int]:
        """The weight of the step's targets, their number, and its tokens, over all processes, all of which ask for it.

        The weight is what the loss is divided by: the number of targets where nothing is weighted.
        """
        if self._counted is None:
            with_targets = [batch for batch in self.batches if batch.num_targets]  # one without fills a gap
            counted = ("total_weight", "num_targets", "num_tokens")
            mine = (sum(getattr(batch, name) for batch in with_targets) for name in counted)
            weight, targets, tokens = self._team.total(*mine)
            self._counted = weight, int(targets), int(tokens)
        return self._counted

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._team.stop_if(interrupt.requested())
            yield batch


def record(outcome: Outcome, log: Metrics, step: int, epoch: float) -> StepRecord | None:
    """Hand the numbers of an outcome to the metrics: now `step` steps are done.

    Returns the record of the update before, which can be read without waiting (docs/decisions/0006).
    """
    if (update := outcome.update) is None:
        before = log.flush()
    else:
        before = log.step(
            update.output, step=step, epoch=epoch, lr=update.lr,
            num_targets=update.num_targets, num_tokens=update.num_tokens,
        )  # fmt: skip
    for event in outcome.events:
        log.event(event)
    return before


class StepPolicy(Protocol):
    """Decides what each step does. It is built from the config.

    A resumed run must decide as the uninterrupted one, and every process of a run as the others: a decision depends on
    the step, the state, and numbers that are the same in all processes (`StepOutput`, `TrainingStep.mean_loss`). What
    a step queued on the device is best read in the next one, which makes nobody wait (docs/decisions/0006).
    """

    name: str  # in the table of `policies.py`
    num_probes: int  # documents to hold out from the training data

    def take(self, step: TrainingStep) -> Outcome:
        """Take one step. It leaves no gradient behind.

        Where it raises, adapter, optimizer and state are as they were before: the run saves them, and the run that
        resumes takes the step again.
        """
        ...

    def state(self) -> PolicyState: ...

    def load_state(self, state: PolicyState) -> None:
        """Continue from a state, which after a rollback is an earlier one; an empty state is that of a new policy.

        ValueError for a state that is not one of this policy.
        """
        ...


class Ordinary:
    """Every step makes an optimizer update with the gradient of all its micro-batches."""

    name = "ordinary"
    num_probes = 0

    def __init__(self, config: Config) -> None:
        """The config says nothing about it."""

    def take(self, step: TrainingStep) -> Outcome:
        step.add_gradients()
        return Outcome(step.update())

    def state(self) -> PolicyState:
        return PolicyState()

    def load_state(self, state: PolicyState) -> None:
        if not state.is_empty:
            raise ValueError("the ordinary policy has no state")
