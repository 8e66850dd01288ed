"""A run, in order of time: from a config to a run directory with the adapter in it. The only training loop.

Every backend and every step policy trains here. What a step is, when to save, and what to do when numbers go wrong or
memory runs out are the collaborators of a `Job`, each in its own file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from dualtune.base import faults
from dualtune.base.errors import DiskError, OutOfMemory, Paused, Preempted
from dualtune.config import Config
from dualtune.data.batches import Ahead
from dualtune.data.documents import Show
from dualtune.engine.backend import Backend, Batch, Engine, SharedBase, state_size
from dualtune.engine.memory.estimate import num_trained
from dualtune.model.config_file import position_table_size, read_config
from dualtune.model.formats.naming import Naming
from dualtune.train.evaluation import evaluate, using_result
from dualtune.train.generation.inference import LoadedModel
from dualtune.train.guards import Guards
from dualtune.train.hooks import (
    EVALUATION,
    FINGERPRINTS,
    RESULT,
    TRACKERS,
    Event,
    Hook,
    RunInfo,
    StepRecord,
    StepTaken,
    Watchers,
    installed_hooks,
)
from dualtune.train.hooks import SAMPLES as SAMPLING
from dualtune.train.memory import recovery_of, resume_smaller, suspected
from dualtune.train.objective import is_due, steps_until_due
from dualtune.train.objectives.comparison import AnswerComparison, evaluate_answers
from dualtune.train.objectives.served_teacher import TeacherLost
from dualtune.train.objectives.teachers import evaluate_taught
from dualtune.train.policies import MakePolicy, restore_policy
from dualtune.train.policy import StepPolicy
from dualtune.train.prepare import Prepared, prepare
from dualtune.train.profiler.profiler import Timeline
from dualtune.train.recovery import explained
from dualtune.train.result import (
    TrainResult,
    adapter_naming,
    has_result,
    in_result,
    result_at,
    result_fingerprints,
    result_record,
    write_result,
)
from dualtune.train.rl.in_step import apart
from dualtune.train.rl.rollouts import RolloutFile
from dualtune.train.samples import Samples
from dualtune.train.saver import Saver, check_space
from dualtune.train.start import load_comparison, load_engine, log_start, write_records
from dualtune.train.state.checkpoint import bytes_per_weight, restore
from dualtune.train.state.metrics import History, Metrics, each_row
from dualtune.train.state.run_dir import (
    METRICS,
    REPORT,
    ROLLOUTS,
    SAMPLES,
    TIMELINE,
    RunDir,
    open_together,
)
from dualtune.train.step import TrainingStep
from dualtune.train.team import PeerFailed, Team
from dualtune.train.verdict import verdict_of

MOST_FAILURES = 3  # of rewards, that are told of a step


class Display:
    """What shows a run to a person. This one shows nothing; `dualtune.show.run` has that of the commands."""

    def check(self, config: Config) -> None:
        """Raise EnvironmentFault if something that the config wants to be shown with is not installed."""

    def hooks(self, prepared: Prepared, run_dir: Path) -> Sequence[Hook]:
        """Return the hooks that show the run, in the first process; they are called before those of the caller."""
        return ()

    def write_report(self, run_dir: Path) -> None:
        """Write the page of a run that has ended."""

    def log_result(self, run_dir: Path, result: Path) -> None:
        """Say where the result is, after all other lines."""


NO_DISPLAY = Display()


def run(
    config: Config, backend: Backend, hooks: Sequence[Hook] = (), *, resume: str = "auto",
    show: Show = lambda what, share: None, announce: Callable[[Prepared], object] = lambda prepared: None,
    restart: Path | None = None, policy: MakePolicy | None = None, shared_base: SharedBase | None = None,
    pause_after: int | None = None, display: Display = NO_DISPLAY,
) -> TrainResult:  # fmt: skip
    """Train with a config on a backend. `resume`: see `open_run`. A stop signal saves the state; raises Preempted.

    `show` gets the progress of tokenizing. `announce` gets the prepared run before the model is loaded, and an error
    that it raises ends the run. `restart`: the note of a parent that restarts a killed run. `policy`: see `prepare`.
    `shared_base`: where the base model stays for the next run. `pause_after`: the step after which the run is
    evaluated, saved and stopped; raises Paused. `display`: what shows the run.
    """
    team = Team(backend.world())
    if team.is_first:
        display.check(config)
    # The directory is locked first: what was saved there decides what the config means.
    with open_together(config, resume, team) as run_dir:
        prepared = prepare(config, backend, run_dir.saved, show, team, policy)
        announce(prepared)
        with explained(backend, prepared.config, "in training"):
            return execute(prepared, run_dir, hooks, restart, shared_base, pause_after, display, show)


def execute(
    prepared: Prepared, run_dir: RunDir, hooks: Sequence[Hook] = (), restart: Path | None = None,
    shared_base: SharedBase | None = None, pause_after: int | None = None, display: Display = NO_DISPLAY,
    show: Show = lambda what, share: None,
) -> TrainResult:  # fmt: skip
    """Train a prepared run in an open run directory. The last six arguments are those of `run`."""
    config, resumed, team = prepared.config, prepared.resumed, prepared.team

    # A run that has ended is not trained again, and its model is not loaded.
    if resumed is not None and team.agree(has_result(resumed, run_dir.result(config))):
        finished = result_at(run_dir, config, resumed.checkpoint.step, History(each_row(run_dir.path / METRICS)))
        return replace(finished, was_finished=True, without_effect=tuple(resumed.without_effect or ()))

    # The state of another policy, or a full disk, ends the run before the model is loaded, which takes long. The disk
    # is asked again when the number of weights is known.
    saved, num_steps = prepared.checkpoint, prepared.data.order.num_steps
    first_step, policy = saved.step if saved else 0, prepared.make_policy(config)
    if saved is not None:
        restore_policy(policy, saved)
    if team.is_first and (plan := prepared.memory.plan) is not None:
        check_space(run_dir, config, num_trained(plan.decoder, plan.ask), num_steps, first_step)
    with explained(prepared.backend, config, "while the model was loaded"):
        engine = load_engine(prepared, shared_base)
    # The reference is computed with the engine as it starts, before a checkpoint is restored in it.
    comparison = load_comparison(prepared, engine, show)
    if (start := saved or prepared.start_state) is not None:
        restore(engine, start)
    if team.is_first:
        check_space(run_dir, config, state_size(engine), num_steps, first_step)

    # From here on the directory holds a run; what it says of the process before is read before it is continued.
    run_dir.has_begun = True
    run_dir.notes += [] if restart else suspected(run_dir, prepared.memory)
    write_records(run_dir, prepared, engine)
    job = Job(prepared, run_dir, engine, comparison, policy, hooks, display, pause_after)
    try:
        job.tell_start()
        if restart is not None:
            resume_smaller(restart, job.recovery, prepared, first_step, job.log)
        with Ahead(job.data_batches, num_steps) as batches:
            job.batches, job.recovery.on_change = batches, batches.drop
            num_steps = fit(job)

        _finish(job, num_steps)
        if config.run.report and team.is_first:
            _write_report(display, run_dir.path, job.log, num_steps)
        if config.run.track:
            job.watchers.enter(num_steps, TRACKERS)
    except Preempted as stop:
        raise (_stopped(stop, job.saver) if team.is_first else stop) from None
    finally:
        job.close()

    # A result without a checkpoint is a failure all the same: the run could not have been resumed.
    if job.saver.newest is None and job.saver.failure is not None:
        raise DiskError(f"{job.saver.failure} No checkpoint could be saved; the result is in {run_dir.result(config)}")
    if team.is_first:
        display.log_result(run_dir.path, run_dir.result(config))
    return result_at(run_dir, config, num_steps, job.log.history)


class Job:
    """A run that trains: engine and policy, and what watches, guards and saves them, each made of those before it."""

    def __init__(
        self, prepared: Prepared, run_dir: RunDir, engine: Engine, comparison: AnswerComparison | None,
        policy: StepPolicy, hooks: Sequence[Hook], display: Display, pause_after: int | None,
    ) -> None:  # fmt: skip
        """`pause_after`: the step after which the run is saved and stopped, to be resumed later."""
        saved = prepared.checkpoint
        self.prepared, self.run_dir, self.engine, self.policy = prepared, run_dir, engine, policy
        self.comparison = comparison
        self.first_step, self.num_steps = saved.step if saved else 0, prepared.data.order.num_steps
        self.last_step = self.num_steps if pause_after is None else min(self.num_steps, pause_after)
        self.watchers, self._unusable_hooks = _watchers(prepared, run_dir, display, hooks)
        self.log = Metrics(run_dir.path / METRICS, prepared.backend, self.watchers, self.first_step)
        self.guards = Guards(prepared.config, self._rows_of_step, saved.state.get("guards") if saved else None)
        self.recovery = recovery_of(prepared, engine, self.log)
        self.saver = Saver(self)
        self.samples = _samples(prepared, engine, run_dir.path / SAMPLES, self.first_step)
        writes = prepared.rollouts is not None and prepared.team.is_first
        self.rollouts = RolloutFile(run_dir.path / ROLLOUTS, self.first_step) if writes else None
        # The micro-batches of a step, counted from 0.
        self.batches: Callable[[int], list[Batch]] = self.data_batches

    def data_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step's documents. A step that draws samples has others, which it makes."""
        return [] if self.prepared.rollouts else self.prepared.batches(step, self.recovery.layout)

    def tell_start(self) -> None:
        """Tell the hooks that the run starts, and log the facts of its start."""
        data, engine = self.prepared.data, self.engine.description
        state_bytes = state_size(self.engine) * bytes_per_weight(self.prepared.optimizer)
        self.watchers.tell("on_start", RunInfo(
            self.run_dir.path, self.prepared.backend.name, self.num_steps, self.first_step, len(data.train),
            len(data.eval), engine.as_json(), state_bytes,
        ))  # fmt: skip
        for problem in self._unusable_hooks:
            self.log.event(Event(self.first_step, "hook_failed", problem))
        naming = self.naming if self.prepared.team.is_first else None
        log_start(self.prepared, self.run_dir, self.log, self.engine, naming)

    @cached_property
    def naming(self) -> Naming | None:
        """How other tools name the adapted layers; only the first process asks, because a trial may take seconds."""
        return adapter_naming(self.prepared, self.engine)

    def close(self) -> None:
        """Write what waits, and end the hooks."""
        self.log.write_rest()
        self.watchers.end()
        self.log.close()
        self.saver.close()
        if self.prepared.rollouts is not None:
            self.prepared.rollouts.close()

    def _rows_of_step(self, step: int) -> list[str]:
        """Return the data rows of a step, counted from 1, as path:line."""
        ids: list[int] = self.prepared.data.order.step(step - 1).documents.tolist()
        return [self.prepared.data.train[i].where for i in ids]


def fit(job: Job) -> int:
    """Train from the job's first step to its last, and return the number of steps done.

    Raises Preempted on a stop signal, Paused after the job's last step if that is not the run's.
    """
    step = job.first_step
    job.prepared.backend.reset_peak_memory()
    if job.prepared.config.guards.on_spike == "rollback" and step == 0:
        job.saver.save(0)  # a rollback needs a checkpoint to return to
    # Also if a run was stopped after the checkpoint and before the evaluation of the same step.
    _evaluate_if_due(job, step)
    job.log.restart_clock()

    while step < job.last_step and not job.guards.stops_early:
        step = _take_step(job, step)
        step = _save_and_evaluate_if_due(job, step)

    if job.guards.stops_early:
        job.saver.save(step)
    elif step < job.num_steps:
        raise Paused(f"Paused after step {step} of {job.num_steps}")
    return step


def _finish(job: Job, num_steps: int) -> None:
    """Write the result: the weights of the last step or of the best evaluation, and what they compute."""
    prepared, engine, log = job.prepared, job.engine, job.log
    job.saver.check_files(num_steps)
    with in_result(prepared, engine, job.saver, log, num_steps):
        verdict = verdict_of(log.history)
        log.event(Event(num_steps, "verdict", str(verdict), {"verdict": verdict.word}))
        job.watchers.enter(num_steps, FINGERPRINTS)
        prints = result_fingerprints(prepared, engine)  # with a sharded base, all processes compute them together
        job.watchers.enter(num_steps, RESULT)
        if prepared.team.is_first:
            entries = result_record(prepared, engine, log, job.guards, job.recovery, num_steps)
            result = job.run_dir.result(prepared.config)
            try:
                write_result(result, prepared, engine, job.naming, entries | {"fingerprints": prints})
            except DiskError as error:
                raise DiskError(
                    f"{error} {_newest(job.saver)}. Free some space and run the same command again, which resumes"
                ) from error


def _take_step(job: Job, step: int) -> int:
    """Let the policy take a step, and check the previous step. Return the number of steps done."""
    prepared, team = job.prepared, job.prepared.team
    max_steps = steps_until_due(prepared.config.run, step, job.last_step)
    taking = TrainingStep(
        prepared, job.engine, step, job.batches, max_steps=max_steps, recovery=job.recovery,
        comparison=job.comparison,
        phase=partial(job.watchers.enter, step + 1), watch=partial(job.watchers.watched, step + 1),
        show=partial(job.watchers.show_gradients, step + 1),
    )  # fmt: skip
    try:
        outcome = job.policy.take(taking)
    except Preempted:  # the partial gradient is lost, and the resumed run repeats the step
        job.saver.save(_settle(job, step))
        team.check()
        raise
    except (OutOfMemory, TeacherLost, PeerFailed) as error:
        if error.exit_code in (OutOfMemory.exit_code, TeacherLost.exit_code):
            job.saver.save(_settle(job, step))
        raise
    faults.reach("step")
    if job.rollouts is not None and taking.samples is not None:
        job.rollouts.write(taking.samples.rows)
        _tell_failures(job, step + 1, taking.samples.failures)
    if not 1 <= outcome.num_steps <= max_steps:
        raise ValueError(f"step policy {job.policy.name}: took {outcome.num_steps} steps, allowed: 1 to {max_steps}")
    step += outcome.num_steps
    update = outcome.update
    counts = (update.num_tokens, update.num_targets, update.lr) if update else (0, 0, None)
    job.watchers.tell_now("after_step", StepTaken(step, *counts, outcome.phase))

    # Numbers are read one step late, so that nothing waits (decision 0006): the guards see the record of the step
    # before, or on a CPU of this one.
    with team.waiting("the gradients of the other processes"):
        if update is None:
            record = job.log.flush()
        else:
            planned = prepared.data.order.step(step - 1)
            record = job.log.step(
                update.output, len(planned.documents) // prepared.data.train.answers, step=step, epoch=planned.epoch,
                lr=update.lr, num_targets=update.num_targets, num_tokens=update.num_tokens, metrics=update.metrics,
            )  # fmt: skip
        for event in outcome.events:
            job.log.event(event)
    step = _pass_to_guards(job, step, record)
    if outcome.must_save:
        step = _settle(job, step)
        job.saver.save(step)
        job.log.restart_clock()
    return step


def _pass_to_guards(job: Job, step: int, record: StepRecord | None) -> int:
    """Pass a record to the guards. Return the number of steps done."""
    if record is not None:
        if event := job.guards.on_step(record):
            job.log.event(event)
        job.guards.check(job.num_steps)
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
    restore_policy(job.policy, saved)
    job.guards.rolled_back(saved.step, spike, saved.state.get("guards", {}))
    text = f"rolled back to the weights after step {saved.step}; steps {saved.step + 1} to {spike} are not repeated"
    job.log.event(Event(spike, "rollback", text, {"to_step": saved.step}))
    return spike


def _tell_failures(job: Job, step: int, failures: Sequence[str]) -> None:
    for failure in failures[:MOST_FAILURES]:
        job.log.event(Event(step, "reward_failed", failure))


def _save_and_evaluate_if_due(job: Job, step: int) -> int:
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
    prepared, log = job.prepared, job.log
    if (before := log.history.evals.get(step)) is not None:  # the rows are the same in all processes
        job.guards.on_eval(before)  # from before the run was stopped
        return
    measure = evaluate
    if job.comparison is not None:
        measure = partial(evaluate_answers, comparison=job.comparison)
    elif prepared.rollouts is not None:
        measure = prepared.rollouts.evaluate
    elif (distillation := prepared.distillation) is not None:
        if (teaching := prepared.teaching) is not None:
            measure = partial(evaluate_taught, distillation, teaching.teacher, teaching.eval)
        else:
            assert distillation.eval is not None  # what is not recorded has a teacher
            measure = partial(distillation.evaluate, soft_targets=distillation.eval)
    try:
        job.watchers.enter(step, EVALUATION)
        with using_result(job.engine, prepared.optimizer):
            evaluation = measure(
                job.engine, prepared.data.eval, job.recovery, step,
                lambda done, total: job.watchers.tell("on_eval_batch", done, total), prepared.team,
            )  # fmt: skip
    except Exception:  # on any error, also a stop request: do not lose the steps so far
        job.saver.save(step)
        raise
    log.eval(evaluation)
    _tell_failures(job, step, evaluation.failures)
    if not math.isfinite(evaluation.eval_loss):
        log.event(Event(step, "nonfinite_eval", f"evaluation after step {step}: loss {evaluation.eval_loss}"))
    if job.guards.on_eval(evaluation):
        job.saver.save(step)
    if job.guards.stops_early:
        best = job.guards.state
        text = f"evaluations since the best one (loss {best.best_loss}, step {best.best_step}): {best.evals_since_best}"
        log.event(Event(step, "early_stop", text))
    # The first process answers the prompts of the config. A stop signal ends the answers in all processes; the next
    # micro-batch sees it, too.
    if prepared.config.run.sample_prompts:
        job.watchers.enter(step, SAMPLING)
        with contextlib.suppress(Preempted), apart(job.engine, prepared.team) as engine:
            if job.samples is not None:
                job.samples.take(engine, step, partial(job.watchers.tell, "on_sample"), log.event)


def _eval_due(job: Job, step: int) -> bool:
    ends = (0, job.last_step, job.num_steps)
    return len(job.prepared.data.eval) > 0 and (step in ends or is_due(step, job.prepared.config.run.eval_every))


def _watchers(
    prepared: Prepared, run_dir: RunDir, display: Display, hooks: Sequence[Hook]
) -> tuple[Watchers, list[str]]:
    """Return what calls the hooks: timeline of memory, display, those of the caller, the installed ones; and problems.

    Only the first of several processes writes the timeline, is shown, and loads the installed hooks.
    """
    if not prepared.team.is_first:
        return Watchers(hooks), []
    installed, problems = installed_hooks()
    timeline = Timeline(run_dir.path / TIMELINE, prepared.backend.memory)
    return Watchers([timeline, *display.hooks(prepared, run_dir.path), *hooks, *installed]), problems


def _samples(prepared: Prepared, engine: Engine, path: Path, first_step: int) -> Samples | None:
    """Return what answers run.sample_prompts, in the first process."""
    files, prompts = prepared.model, prepared.config.run.sample_prompts
    if not prompts or not prepared.team.is_first:
        return None
    model = LoadedModel(engine, files.tokenizer, positions=position_table_size(read_config(files.directory)))
    return Samples(model, prepared.optimizer, prompts, path, first_step, prepared.system_message)


def _stopped(stop: Preempted, saver: Saver) -> Exception:
    """Return the error for a run that a signal stopped."""
    if saver.failure is not None:
        return DiskError(f"{stop}, but the state could not be saved. {_newest(saver)}. {saver.failure}")
    return type(stop)(f"{stop}; saved in {saver.newest}")


def _newest(saver: Saver) -> str:
    return f"The newest checkpoint is {saver.newest}" if saver.newest else "There is no checkpoint"


def _write_report(display: Display, path: Path, log: Metrics, step: int) -> None:
    """Write the page of the run. The result is on disk, so a page that cannot be written is no reason to fail."""
    try:
        display.write_report(path)
    except Exception as error:  # noqa: BLE001  whatever is wrong with the page, the run is done
        log.event(Event(step, "report_failed", f"{REPORT} was not written: {type(error).__name__}: {error}"))
