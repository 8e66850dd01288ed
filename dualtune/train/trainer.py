"""The training loop: the only one, for every backend and every step policy; in order of time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dualtune.base import faults
from dualtune.base.errors import OutOfMemory, Paused, Preempted
from dualtune.engine.backend import Batch, Engine
from dualtune.train.evaluation import evaluate, using_result
from dualtune.train.guards import Guards
from dualtune.train.hooks import EVALUATION, SAMPLES, Event, StepRecord, Watchers
from dualtune.train.moments import Moments
from dualtune.train.objective import is_due, steps_until_due
from dualtune.train.policies import restore_policy
from dualtune.train.prepare import Prepared
from dualtune.train.recovery import Recovery
from dualtune.train.samples import Samples
from dualtune.train.saver import Saver
from dualtune.train.state.checkpoint import restore
from dualtune.train.state.metrics import Metrics
from dualtune.train.step import TrainingStep, record
from dualtune.train.team import PeerFailed


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a run needs for training."""

    prepared: Prepared
    engine: Engine
    watchers: Watchers
    log: Metrics
    guards: Guards
    saver: Saver
    recovery: Recovery
    moments: Moments
    batches: Callable[[int], list[Batch]]  # the micro-batches of a step, counted from 0
    samples: Samples | None = None  # in the first process, if any are wanted
    pause_after: int | None = None  # the step after which the run is saved and stopped, to be resumed later

    @property
    def last_step(self) -> int:
        """The step with which this call ends, unless it ends early."""
        num_steps = self.prepared.data.order.num_steps
        return num_steps if self.pause_after is None else min(num_steps, self.pause_after)


def fit(job: Job, first_step: int = 0) -> int:
    """Train from step `first_step` to the end, and return the number of steps done.

    Raises Preempted on a stop signal, Paused after `pause_after`.
    """
    step = first_step
    job.prepared.backend.reset_peak_memory()
    if job.prepared.config.guards.on_spike == "rollback" and step == 0:
        job.saver.save(0)  # a rollback needs a checkpoint to return to
    # Also if a run was stopped after the checkpoint and before the evaluation of the same step.
    _evaluate_if_due(job, step)
    job.log.restart_clock()

    while step < job.last_step and not job.guards.stops_early:
        step = _take_step(job, step)
        step = _do_what_is_due(job, step)

    if job.guards.stops_early:
        job.saver.save(step)
    elif step < job.prepared.data.order.num_steps:
        raise Paused(f"Paused after step {step} of {job.prepared.data.order.num_steps}")
    return step


def _take_step(job: Job, step: int) -> int:
    """Let the policy take a step, and check the previous step. Return the number of steps done."""
    prepared, team = job.prepared, job.prepared.team
    max_steps = steps_until_due(prepared.config.run, step, job.last_step)
    watched = job.moments.of_step(step + 1)
    taking = TrainingStep(
        prepared, job.engine, step, job.batches, max_steps=max_steps, recovery=job.recovery, **watched
    )
    try:
        outcome = prepared.policy.take(taking)
    except Preempted:  # the partial gradient is lost, and the resumed run repeats the step
        job.saver.save(_settle(job, step))
        team.check()
        raise
    except (OutOfMemory, PeerFailed) as error:
        if error.exit_code == OutOfMemory.exit_code:
            job.saver.save(_settle(job, step))
        raise
    faults.reach("step")
    if not 1 <= outcome.num_steps <= max_steps:
        raise ValueError(
            f"step policy {prepared.policy.name}: took {outcome.num_steps} steps, allowed: 1 to {max_steps}"
        )
    step += outcome.num_steps
    job.moments.step_taken(step, outcome)
    with team.waiting("the gradients of the other processes"):
        record_before = record(outcome, job.log, step, prepared.data.order.step(step - 1).epoch)
    return _pass_to_guards(job, step, record_before)


def _pass_to_guards(job: Job, step: int, record: StepRecord | None) -> int:
    """Pass a record to the guards. Return the number of steps done."""
    if record is not None:
        if event := job.guards.on_step(record):
            job.log.event(event)
        job.guards.check()
    return step if job.guards.spike_step is None else _roll_back(job, step, job.guards.spike_step)


def _settle(job: Job, step: int) -> int:
    """Read and check what the device still holds, so that the state can be saved. Return the number of steps done."""
    return _pass_to_guards(job, step, job.log.flush())


def _roll_back(job: Job, step: int, spike: int) -> int:
    """Return to the checkpoint before a spike and continue after the spike, skipping the data between.

    As in PaLM (Chowdhery et al., arXiv 2204.02311, section 5.1). The step number counts the data, so a step that was
    taken after the spike is repeated.
    """
    job.guards.spike_step = None
    saved = job.saver.before_spike(spike)
    if saved is None:
        job.log.event(Event(spike, "no_rollback", "there is no older checkpoint to return to, so the run continues"))
        return step
    job.log.discard()
    restore(job.engine, saved)
    restore_policy(job.prepared.policy, saved)
    job.guards.rolled_back(saved.step, spike, saved.state.get("guards", {}))
    text = f"rolled back to the weights after step {saved.step}; steps {saved.step + 1} to {spike} are not repeated"
    job.log.event(Event(spike, "rollback", text, {"to_step": saved.step}))
    return spike


def _do_what_is_due(job: Job, step: int) -> int:
    """Save and evaluate if due. Return the number of steps done."""
    prepared, saver = job.prepared, job.saver
    is_last = step == job.last_step
    saver.check_space(step)
    save_due = prepared.team.agree(saver.was_requested()) or is_last or is_due(step, prepared.config.run.save_every)
    if not (save_due or _eval_due(job, step)):
        return step
    step = _settle(job, step)
    if save_due:
        saver.save(step)
    _evaluate_if_due(job, step)
    job.log.restart_clock()
    return step


def _evaluate_if_due(job: Job, step: int) -> None:
    if not _eval_due(job, step):
        return
    record, log = job.log.history.evals.get(step), job.log  # the rows are the same in all processes
    if record is not None:
        job.guards.on_eval(record)  # from before the run was stopped
        return
    try:
        prepared = job.prepared
        job.moments.enter(step, EVALUATION)
        with using_result(job.engine, prepared.optimizer):
            record = evaluate(
                job.engine, prepared.data.eval, job.recovery, step,
                lambda done, total: job.watchers.tell("on_eval_batch", done, total), prepared.team,
            )  # fmt: skip
    except Exception:  # on any error, also a stop request: do not lose the steps so far
        job.saver.save(step)
        raise
    log.eval(record)
    if not math.isfinite(record.eval_loss):
        log.event(Event(step, "nonfinite_eval", f"evaluation after step {step}: loss {record.eval_loss}"))
    if job.guards.on_eval(record):
        job.saver.save(step)
    if job.guards.stops_early:
        best = job.guards.state
        text = f"evaluations since the best one (loss {best.best_loss}, step {best.best_step}): {best.evals_since_best}"
        log.event(Event(step, "early_stop", text))
    _sample(job, step)


def _sample(job: Job, step: int) -> None:
    """Let the first process answer the prompts of the config; the others wait for it, however long that takes."""
    if job.prepared.config.run.sample_prompts:
        job.moments.enter(step, SAMPLES)
        samples, tell = job.samples, partial(job.watchers.tell, "on_sample")
        job.prepared.team.first_alone(lambda: samples.take(step, tell, job.log.event) if samples else None)


def _eval_due(job: Job, step: int) -> bool:
    ends = (0, job.last_step, job.prepared.data.order.num_steps)
    return len(job.prepared.data.eval) > 0 and (step in ends or is_due(step, job.prepared.config.run.eval_every))
