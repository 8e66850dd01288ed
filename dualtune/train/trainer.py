"""The training loop: the only one, for every backend. It reads in time order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualtune.backend import Backend, Batch, Engine
from dualtune.config import Config
from dualtune.data.documents import Document
from dualtune.data.order import Order, micro_batches
from dualtune.hooks import EvalRecord, Hook
from dualtune.train.evaluation import evaluate
from dualtune.train.metrics import Metrics
from dualtune.train.schedule import learning_rate


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a run trains with."""

    config: Config
    backend: Backend
    engine: Engine
    order: Order
    train: Sequence[Document]
    eval: Sequence[Document]
    micro_batch_tokens: int
    hooks: Sequence[Hook]

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step, counted from 0."""
        ids = self.order.step(step).documents.tolist()
        return micro_batches(self.train, ids, max_tokens=self.micro_batch_tokens, seed=self.config.run.seed, step=step)


def fit(job: Job, metrics: Metrics, save: Callable[[int], None], first_step: int = 0) -> None:
    """Train from step `first_step` to the end. `save(step)` writes a checkpoint after that many steps."""
    config, engine, num_steps = job.config, job.engine, job.order.num_steps
    job.backend.reset_peak_memory()
    # Also where a run was stopped after the checkpoint and before the evaluation of the same step.
    if _eval_due(job, first_step) and not metrics.has_eval(first_step):
        metrics.eval(_evaluate(job, first_step))
    metrics.restart_clock()

    for step in range(first_step, num_steps):
        batches = job.batches(step)
        num_targets = sum(batch.num_targets for batch in batches)
        lr = learning_rate(config, step, num_steps)

        for batch in batches:
            engine.forward_backward(batch, num_targets=num_targets)
        output = engine.optim_step(lr=lr, max_grad_norm=config.train.max_grad_norm)

        metrics.step(
            output,
            step=step + 1,
            epoch=job.order.step(step).epoch,
            lr=lr,
            num_targets=num_targets,
            num_tokens=sum(batch.num_tokens for batch in batches),
        )
        last = step + 1 == num_steps
        eval_due = _eval_due(job, step + 1)
        save_due = last or _due(step + 1, config.run.save_every)
        if eval_due or save_due:
            metrics.flush()
            if save_due:
                save(step + 1)
            if eval_due:
                metrics.eval(_evaluate(job, step + 1))
            metrics.restart_clock()


def _evaluate(job: Job, step: int) -> EvalRecord:
    def show(done: int, total: int) -> None:
        for hook in job.hooks:
            hook.on_eval_batch(done, total)

    return evaluate(job.engine, job.eval, job.micro_batch_tokens, step, show)


def _eval_due(job: Job, step: int) -> bool:
    return bool(job.eval) and (step in (0, job.order.num_steps) or _due(step, job.config.run.eval_every))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
