"""The training loop: the only one, for every backend. It reads in time order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualtune import faults, interrupt
from dualtune.backend import Batch, Engine
from dualtune.hooks import Event, StepRecord
from dualtune.train.checkpoint import restore
from dualtune.train.evaluation import evaluate
from dualtune.train.guards import Guards
from dualtune.train.metrics import Metrics
from dualtune.train.prepare import Prepared
from dualtune.train.saver import Saver
from dualtune.train.schedule import is_due, learning_rate
from dualtune.train.team import Team
from dualtune.train.watchers import Watchers


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a run trains with."""

    prepared: Prepared
    engine: Engine
    watchers: Watchers
    log: Metrics
    guards: Guards
    saver: Saver
    batches: Callable[[int], list[Batch]]  # the micro-batches of a step, counted from 0


def fit(job: Job, first_step: int = 0) -> int:
    """Train from step `first_step` to the end, and return the number of steps done. Preempted if a signal asks."""
    config, engine, log, guards, saver = job.prepared.config, job.engine, job.log, job.guards, job.saver
    num_steps = job.prepared.order.num_steps
    team = job.prepared.team
    step = first_step
    job.prepared.backend.reset_peak_memory()
    if config.guards.on_spike == "rollback" and step == 0:
        saver.save(0)  # there must be something to return to
    # Also where a run was stopped after the checkpoint and before the evaluation of the same step.
    _evaluate_if_due(job, step)
    log.restart_clock()

    while step < num_steps and not guards.stops_early:
        batches = job.batches(step)
        weight, num_targets, num_tokens = _count(team, batches)
        lr = learning_rate(config, step, num_steps)

        for batch in batches:
            if team.agree(interrupt.requested()):
                _stop(job, step)
            engine.forward_backward(batch, num_targets=weight)
        team.check()
        output = engine.optim_step(lr=lr, max_grad_norm=config.train.max_grad_norm)
        faults.reach("step")

        with team.waiting("the gradients of the other processes"):
            record = log.step(
                output,
                step=step + 1,
                epoch=job.prepared.order.step(step).epoch,
                lr=lr,
                num_targets=num_targets,
                num_tokens=num_tokens,
            )
        step += 1
        _judge(job, record)
        if guards.spike_step is not None:  # it was the step before, so the one just made is taken again
            step = _roll_back(job, step)

        save_due = team.agree(saver.asked()) or step == num_steps or is_due(step, config.run.save_every)
        if save_due or _eval_due(job, step):
            step = _settle(job, step)
            if save_due:
                saver.save(step)
            _evaluate_if_due(job, step)
            log.restart_clock()

    if guards.stops_early:
        saver.save(step)
    return step


def _count(team: Team, batches: Sequence[Batch]) -> tuple[float, int, int]:
    """The weight of the targets, their number, and the tokens of the whole step, the shares of all processes together.

    The weight is what the loss is divided by: the number of targets where nothing is weighted.
    """
    with_targets = [batch for batch in batches if batch.num_targets]  # one without fills a gap
    counted = ("total_weight", "num_targets", "num_tokens")
    weight, targets, tokens = team.total(*(sum(getattr(batch, n) for batch in with_targets) for n in counted))
    return weight, int(targets), int(tokens)


def _settle(job: Job, step: int) -> int:
    """Read what the device still holds and judge it, so that the state can be saved. Returns where the run stands."""
    _judge(job, job.log.flush())
    return step if job.guards.spike_step is None else _roll_back(job, step)


def _stop(job: Job, step: int) -> None:
    """Save and raise Preempted. Gradients of the step that was begun are left behind: it is taken again."""
    job.saver.save(_settle(job, step))
    job.prepared.team.stop_if(True)


def _judge(job: Job, record: StepRecord | None) -> None:
    if record is None:
        return
    if event := job.guards.on_step(record):
        job.log.event(event)
    job.guards.check()


def _roll_back(job: Job, step: int) -> int:
    """Return to the checkpoint before a spike, and go on after it: the data since the checkpoint is not tried again.

    As in PaLM (Chowdhery et al., arXiv 2204.02311, section 5.1). The number of the step keeps counting the data.
    """
    spike, job.guards.spike_step = job.guards.spike_step, None
    assert spike is not None
    saved = job.saver.before_spike(spike)
    if saved is None:
        job.log.event(Event(spike, "no_rollback", "there is no older checkpoint to return to, so the run goes on"))
        return step
    job.log.discard()
    restore(job.engine, saved)
    job.guards.rolled_back(saved.step, spike, saved.state.get("guards", {}))
    text = f"back to the weights after step {saved.step}; steps {saved.step + 1} to {spike} are left out"
    job.log.event(Event(spike, "rollback", text, {"to_step": saved.step}))
    return spike


def _evaluate_if_due(job: Job, step: int) -> None:
    if not _eval_due(job, step):
        return
    record, log = job.log.history.evals.get(step), job.log  # the rows are the same in all processes
    if record is not None:
        job.guards.on_eval(record)  # it was made before the run was stopped
        return
    try:
        made = job.prepared
        record = evaluate(
            job.engine, made.eval, made.layout, step,
            lambda done, total: job.watchers.tell("on_eval_batch", done, total), made.team,
        )  # fmt: skip
    except Exception:  # whatever happened, also a request to stop: the steps so far shall not be lost with it
        job.saver.save(step)
        raise
    log.eval(record)
    if not math.isfinite(record.eval_loss):
        log.event(Event(step, "nonfinite_eval", f"evaluation after step {step}: loss {record.eval_loss}"))
    if job.guards.on_eval(record):
        job.saver.save(step)
    if job.guards.stops_early:
        best = job.guards.state
        text = f"no better evaluation than {best.best_loss} after step {best.best_step}, {best.evals_since_best} times"
        log.event(Event(step, "early_stop", text))


def _eval_due(job: Job, step: int) -> bool:
    ends = (0, job.prepared.order.num_steps)
    return len(job.prepared.eval) > 0 and (step in ends or is_due(step, job.prepared.config.run.eval_every))
