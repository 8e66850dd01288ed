"""One step of a run: the actions of which a policy makes it.

The training loop and `dualtune bench` take the same steps and do not depend on the policy: a policy gets a
`TrainingStep`, calls its methods, and returns an `Outcome` (`policy.py`). The policies are in `policies.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from dualtune.data.batches import micro_batches
from dualtune.engine.backend import Batch, Engine, LossSum
from dualtune.model.adapter import Tensors
from dualtune.train.evaluation import using
from dualtune.train.objective import learning_rate
from dualtune.train.objectives.comparison import AnswerComparison, answer_sums, at_targets, from_all, with_slopes
from dualtune.train.objectives.distillation import Distillation, SoftTargets
from dualtune.train.objectives.policy_gradient import PolicyLoss
from dualtune.train.objectives.preference import Loss, Objective
from dualtune.train.objectives.teachers import ask
from dualtune.train.policy import Update
from dualtune.train.recovery import Recovery
from dualtune.train.rl.on_policy import TaughtSamples
from dualtune.train.rl.rollouts import Rollouts, StepSamples

if TYPE_CHECKING:
    from dualtune.train.prepare import Prepared

# The phases of a step.
DATA, SAMPLING, GRADIENT, OPTIMIZER, PROBE = "data", "sampling", "micro-batch", "optimizer", "probe"
Phase = Callable[[str], contextlib.AbstractContextManager[None]]
Watch = Callable[[Iterable[Batch]], Iterable[Batch]]


class TrainingStep:
    """The actions of a policy in one step. The ordinary policy calls `add_gradients`, then `update`.

    Every slow action raises Preempted if a signal requests a stop; a policy must not catch it.
    """

    def __init__(
        self, prepared: Prepared, engine: Engine, index: int, make_batches: Callable[[int], list[Batch]], *,
        max_steps: int = 1, phase: Phase = lambda name: contextlib.nullcontext(),
        watch: Watch = lambda batches: batches, show: Callable[[Engine], None] = lambda engine: None,
        recovery: Recovery | None = None, comparison: AnswerComparison | None = None,
    ) -> None:  # fmt: skip
        """`comparison`: the objective of preference training with its reference; None: the loss of sft.

        `phase`: around what is done in a phase of the step. `watch`: around the micro-batches of its gradient.

        `show`: called with that gradient in the engine, before each update.
        """
        self.engine = engine
        self.index = index  # steps done before this one
        self.max_steps = max_steps  # that it may cover: until the next checkpoint, evaluation or the end
        self._prepared, self._team = prepared, prepared.team
        self._make_batches, self._phase, self._watch = make_batches, phase, watch
        self._show = show
        self._comparison = comparison
        self._loss: Loss | PolicyLoss | None = None  # of the comparison, or of the samples
        self._samples: StepSamples | TaughtSamples | None = None  # drawn on first use; kept if memory runs out after it
        self._soft_targets = dict[int, tuple[np.ndarray, np.ndarray]]()  # of a teacher that answers, kept likewise
        self._distilled = 0.0  # the part of a distillation's loss that the engine does not know, in this process
        self._recovery = recovery or Recovery(None, engine, prepared.data.layout, team=prepared.team)
        self._has_gradient = False
        # What is made on first use, and made again, smaller, when memory has run out.
        self._batches: list[Batch] | None = None
        self._counted: tuple[float, int, int] | None = None

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches of this step for this process. They are created on first use."""
        if self._batches is None:
            samples = self.samples
            with self._phase(DATA):
                self._batches = self._make_batches(self.index) if samples is None else self._batches_of(samples)
        return self._batches

    @property
    def samples(self) -> StepSamples | TaughtSamples | None:
        """What the step has drawn of its prompts; None for a run that learns from its data."""
        rollouts = self._prepared.rollouts
        if self._samples is None and rollouts is not None:
            ids: list[int] = self._prepared.data.order.step(self.index).documents.tolist()
            with self._phase(SAMPLING):
                self._samples = rollouts.draw(self.engine, self._prepared.data.train, ids, self.index, self._team)
        return self._samples

    def _batches_of(self, samples: StepSamples | TaughtSamples) -> list[Batch]:
        batches = micro_batches(
            samples.documents, samples.trained, self._recovery.layout, seed=self._prepared.config.run.seed,
            step=self.index, rank=self._team.rank, size=self._team.size,
        )  # fmt: skip
        return [replace(batch, temperature=samples.temperature) for batch in batches]

    @property
    def probe_documents(self) -> Sequence[int]:
        """The training documents that are held out for the policy."""
        return self._prepared.data.probes

    @property
    def steps_left(self) -> int:
        """The steps until the end of the run, with this one."""
        return self._prepared.data.order.num_steps - self.index

    def rate(self, ahead: int = 0) -> float:
        """Return the learning rate of the schedule `ahead` steps after this one; at most that of the last step."""
        num_steps = self._prepared.data.order.num_steps
        return learning_rate(self._prepared.config, max(0, min(self.index + ahead, num_steps - 1)), num_steps)

    def tokens_of(self, documents: Sequence[int]) -> int:
        """Return the number of tokens of these training documents."""
        return int(self._prepared.data.train.lengths[list(documents)].sum())

    def add_gradients(self) -> None:
        """Add the gradient of the step's loss, micro-batch by micro-batch; again, smaller, if memory runs out."""
        self._has_gradient = False
        while not self._has_gradient:
            weight, _, _ = self._totals()
            with self._phase(GRADIENT):
                if (work := self._gradient_work(weight)) is not None:
                    batches, add = work
                    self._has_gradient = self._attempt(self._watch(batches), add)

    def _gradient_work(self, weight: float) -> tuple[list[Batch], Callable[[Batch], None]] | None:
        """Return the micro-batches of the gradient, and what adds that of one. None if memory ran out: try again.

        The loss of sft is the (weighted) mean over the step's targets, and so is that of distillation. An objective
        that compares answers, or learns from samples, needs the log-probabilities of all of them first: they decide
        the weight of each.
        """
        if (distillation := self._prepared.distillation) is not None:
            if (targets := self._soft_targets_of(distillation)) is None:
                return None
            self._distilled = 0.0
            return self.batches, partial(self._add_distilled, distillation, targets, weight)
        if isinstance(samples := self.samples, StepSamples):
            token_slopes = self._slopes_of(samples)
            return None if token_slopes is None else (self.batches, partial(self._add_sloped, token_slopes, weight))
        if self._comparison is None:
            return self.batches, partial(self.engine.forward_backward, divisor=weight)
        if (slopes := self._slopes(self._comparison)) is None:
            return None
        batches = self._trained_batches(self._comparison.objective)
        if batches is not self.batches:
            (weight,) = self._team.total(sum(batch.total_weight for batch in batches))
        return batches, partial(self._add_sloped, slopes, weight)

    def _slopes(self, comparison: AnswerComparison) -> dict[int, float] | None:
        """Return ∂loss/∂(Σ w·log p) of each document of the step. None if memory ran out: try again, smaller."""
        if (sums := self._sums_of(self.batches, dropout=True)) is None:
            return None
        data = self._prepared.data
        ids: list[int] = data.order.step(self.index).documents.tolist()
        totals = self._team.totals([sums.get(i, 0.0) for i in ids])
        self._loss = comparison.objective(comparison.scores(data.train, ids, totals, comparison.train))
        return dict(zip(ids, self._loss.slopes_NA.ravel().tolist(), strict=True))

    def _slopes_of(self, samples: StepSamples) -> dict[int, np.ndarray] | None:
        """Return ∂loss/∂(log p) of the tokens of each sample. None if memory ran out: try again, smaller."""
        logps = dict[int, np.ndarray]()

        def add(batch: Batch) -> None:
            logps.update(at_targets(self.engine.target_logprobs(batch, dropout=True).astype(np.float64), batch))

        if not self._attempt(self.batches, add):
            return None
        rollouts = cast(Rollouts, self._prepared.rollouts)
        logps = from_all(self._team, logps, {n: len(samples.old[n]) for n in samples.trained})
        self._loss, slopes = samples.loss(logps, rollouts.objective, rollouts.max_tokens)
        return slopes

    def _trained_batches(self, objective: Objective) -> list[Batch]:
        """Return the micro-batches of the answers that have slopes."""
        if objective.num_trained == objective.answers:
            return self.batches
        return self._prepared.batches(self.index, self._recovery.layout, objective.num_trained)

    def _add_sloped(self, slopes: Mapping[int, float | np.ndarray], weight: float, batch: Batch) -> None:
        self.engine.forward_backward(with_slopes(batch, slopes, weight), divisor=1.0)

    def _soft_targets_of(self, distillation: Distillation) -> SoftTargets | None:
        """Return the teacher's soft targets of the step's documents. None if memory ran out: try again, smaller."""
        teaching = self._prepared.teaching
        if teaching is None:
            return distillation.train
        samples, soft_targets = self.samples, self._soft_targets
        read = samples.read if isinstance(samples, TaughtSamples) else teaching.train
        # Where memory has run out since, this process may have other documents than before.
        ids = [i for batch in self.batches for row in batch.documents for i in row if i not in soft_targets]
        answers = ask(teaching.teacher, self.engine, read, ids, distillation.k, self._recovery, self.index, self._team)
        if answers is None:
            self._make_smaller()
            return None
        soft_targets.update(answers)
        return soft_targets

    def _add_distilled(self, distillation: Distillation, targets: SoftTargets, weight: float, batch: Batch) -> None:
        contribution = distillation.add_gradient(self.engine, batch, weight, targets)
        self._distilled += contribution.loss
        if isinstance(samples := self.samples, TaughtSamples):
            samples.note(batch, contribution)

    def update(self) -> Update:
        """Apply the optimizer update with the accumulated gradient."""
        _, num_targets, num_tokens = self._totals()
        lr = self.rate()
        self._show(self.engine)
        self._team.check()
        with self._phase(OPTIMIZER), self._team.in_engine():
            output = self.engine.optim_step(lr=lr, max_grad_norm=self._prepared.config.train.max_grad_norm)
        self._has_gradient = False
        if (distillation := self._prepared.distillation) is not None:
            (rest,) = self._team.total(self._distilled)
            output = replace(output, loss=distillation.loss(output.loss, rest))
            if not isinstance(samples := self.samples, TaughtSamples):
                return Update(output, lr, num_targets, num_tokens)
            samples.settle(self._team)
            return Update(output, lr, num_targets, num_tokens, samples.metrics)
        if self._loss is None:
            return Update(output, lr, num_targets, num_tokens)
        # The engine knows the loss as a sum of weighted log-probabilities, which has the gradient but not the value.
        output = replace(output, loss=self._loss.value)
        return Update(output, lr, num_targets, num_tokens, self._loss.metrics)

    def batch_loss(self) -> float:
        """Return the weighted mean of −log p over the step's targets of all processes, without dropout; waits."""
        had_gradient = self._has_gradient
        losses: list[tuple[LossSum, float]] = []
        with self._phase(PROBE):
            while not self._attempt(
                self.batches, lambda batch: losses.append((self.engine.evaluate(batch), batch.total_weight))
            ):
                losses.clear()
        if had_gradient and not self._has_gradient:  # it was discarded
            self.add_gradients()
        loss_sum, weight = self._team.total(
            sum(loss.loss_sum for loss, _ in losses), sum(weight for _, weight in losses)
        )
        return loss_sum / weight

    def document_losses(self, documents: Sequence[int]) -> np.ndarray:
        """Return the mean of −w·log p over each document's targets, float64 [documents], without dropout; synchronizes.

        The same numbers in all processes, in the given order, however the documents lie in micro-batches.
        """
        had_gradient = self._has_gradient
        with self._phase(PROBE):
            while (losses := self._losses_of(documents)) is None:
                pass
        if had_gradient and not self._has_gradient:  # it was discarded
            self.add_gradients()
        return self._team.totals([losses.get(document, 0.0) for document in documents])

    def _losses_of(self, documents: Sequence[int]) -> dict[int, float] | None:
        """Return the losses of this process's share of the documents. None if memory ran out: try again, smaller."""
        if (sums := self._sums_of(self._prepared.batches_of(documents, self._recovery.layout))) is None:
            return None
        targets = self._prepared.data.train.targets
        return {document: -total / max(1, int(targets[document])) for document, total in sums.items()}

    def _sums_of(self, batches: Iterable[Batch], *, dropout: bool = False) -> dict[int, float] | None:
        """Return Σ w·log p of each document of these micro-batches. None if memory ran out."""
        sums = dict[int, float]()

        def add(batch: Batch) -> None:
            sums.update(answer_sums(self.engine.target_logprobs(batch, dropout=dropout), batch))

        return sums if self._attempt(batches, add) else None

    def from_first(self, number: float) -> float:
        """Return the first process's number in all processes, so that they decide alike. All must call it."""
        return self._team.total(number if self._team.is_first else 0.0)[0]

    def trying(self, adapter: Tensors) -> contextlib.AbstractContextManager[None]:
        """Use other adapter weights inside the block, and always restore the engine's own at its end."""
        return using(self.engine, adapter)

    def _totals(self) -> tuple[float, int, int]:
        """Return loss weight and number of the step's targets, and the number of its tokens, over all processes.

        All processes must call this. The loss is divided by the weight, which is the number of targets if all weights
        are 1.
        """
        if self._counted is None:
            with_targets = [batch for batch in self.batches if batch.num_targets]  # the others fill gaps
            counted = ("total_weight", "num_targets", "num_tokens")
            mine = (sum(getattr(batch, name) for batch in with_targets) for name in counted)
            weight, targets, tokens = self._team.total(*mine)
            self._counted = weight, int(targets), int(tokens)
        return self._counted

    def _attempt(self, batches: Iterable[Batch], work: Callable[[Batch], None]) -> bool:
        """Do the work on each micro-batch. If memory runs out, return False: all are then made again, smaller."""
        if self._recovery.attempt(self.index, batches, work):
            return True
        self._make_smaller()
        return False

    def _make_smaller(self) -> None:
        """Make the micro-batches again when they are asked for: the layout has become smaller."""
        self._has_gradient, self._batches, self._counted = False, None, None
