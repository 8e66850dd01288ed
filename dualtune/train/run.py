"""A run: from a config to a run directory that contains an adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dualtune.base.errors import DiskError, FormatError, Preempted
from dualtune.base.files import remove_directory, write_file
from dualtune.base.untrusted import read_json
from dualtune.config import Config, to_yaml
from dualtune.data.batches import Ahead
from dualtune.data.documents import Show
from dualtune.data.preview import counts
from dualtune.data.system_message import KEY as SYSTEM_MESSAGE
from dualtune.engine.backend import Backend, Engine, LoadRequest, SharedBase
from dualtune.engine.memory.estimate import num_trained
from dualtune.model.base_model import ignored_code, position_table_size, read_config, untied_head
from dualtune.model.formats.chat_template import TEMPLATE_FILE
from dualtune.model.formats.directory import MANIFEST_FILE, MAX_BYTES, write_adapter
from dualtune.train.activation_cache import check_layers, use_cache
from dualtune.train.evaluation import result_of, using, using_result
from dualtune.train.fingerprints import base_fingerprints, fingerprints
from dualtune.train.guards import Guards
from dualtune.train.health import RunVerdict, judge
from dualtune.train.hooks import FINGERPRINTS, RESULT, TRACKERS, Event, Hook, RunInfo, Watchers, installed_hooks
from dualtune.train.inference import LoadedModel, load_adapter
from dualtune.train.memory import agreed, entry_of, recovery_of, resume_smaller, suspected
from dualtune.train.model_checks import check_causality, check_packing
from dualtune.train.model_dir import notes_before_training, trained_adapter, write_model
from dualtune.train.moments import Moments
from dualtune.train.policies import MakePolicy
from dualtune.train.prepare import Prepared, Resumed, prepare
from dualtune.train.profiler.profiler import Timeline
from dualtune.train.recovery import Recovery, explained
from dualtune.train.samples import Samples, check_not_split
from dualtune.train.saver import Saver, check_space
from dualtune.train.state.checkpoint import bytes_per_weight, in_names_of, restore, set_aside
from dualtune.train.state.metrics import History, Metrics, each_row
from dualtune.train.state.records import environment, start
from dualtune.train.state.resume import Change, table
from dualtune.train.state.run_dir import CONFIG, ENVIRONMENT, METRICS, REPORT, SAMPLES, TIMELINE, RunDir, open_together
from dualtune.train.team import Team
from dualtune.train.trainer import Job, fit


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run."""

    run_dir: Path
    adapter_dir: Path  # with adapter.method: full, the directory of the trained model
    num_steps: int
    final_loss: float
    eval_loss_before: float | None
    eval_loss: float | None
    verdict: RunVerdict
    report: Path | None = None  # the page for a browser, if it was written
    was_finished: bool = False  # by an earlier call; this call did nothing…
    without_effect: tuple[Change, ...] = ()  # …although these keys have other values now


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
        """Say where the result is, after everything else has been said."""


NO_DISPLAY = Display()


def load_engine(prepared: Prepared, shared_base: SharedBase | None = None) -> Engine:
    """Load the base model with the adapter that training starts from."""
    config = prepared.config
    engine = prepared.backend.load(
        LoadRequest(
            model_dir=prepared.model.directory,
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            init=config.model.init,
            adapter=prepared.spec,
            optimizer=prepared.optimizer,
            seed=config.run.seed,
            longest=prepared.data.longest,
            kernels=config.model.kernels,
            deterministic=config.run.deterministic,
            sharding=config.memory.sharding,
            checkpointing=agreed(prepared.memory.checkpointing, prepared.team),
            resident_layers=config.memory.resident_layers_or_none,
            memory_limit_bytes=config.memory.limit_bytes,
            reused_bytes=prepared.memory.reused_bytes,
            weights=prepared.model.weights,
            shared_base=shared_base,
        )
    )
    if prepared.start is not None:
        load_adapter(engine, prepared.start, config.model.name)
    check_causality(engine)
    if config.data.packing:
        check_packing(engine, prepared.backend)
    if config.train.activation_cache == "disk":
        _use_activation_cache(prepared, engine)
    return engine


def _use_activation_cache(prepared: Prepared, engine: Engine) -> None:
    """Give all documents their hidden states below the lowest adapter, computed now unless they are on disk."""
    config, data = prepared.config, prepared.data
    check_layers(engine.description.layers_below_adapter, prepared.spec.targets)
    names = ("base model's config", "base model's tensors")
    base = {name: prepared.fingerprints[name] for name in names} | {"init": config.model.init}
    if config.model.init == "random":
        base["seed"] = str(config.run.seed)
    use_cache(engine, prepared.backend, [data.train, data.eval], base, prepared.team, packs=config.data.packing)


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
    with open_together(config, resume, team) as run_dir:
        prepared = prepare(config, backend, run_dir.saved, show, team, policy)
        announce(prepared)
        with explained(backend, prepared.config, "in training"):
            return execute(prepared, run_dir, hooks, restart, shared_base, pause_after, display)


def execute(
    prepared: Prepared, run_dir: RunDir, hooks: Sequence[Hook] = (), restart: Path | None = None,
    shared_base: SharedBase | None = None, pause_after: int | None = None, display: Display = NO_DISPLAY,
) -> TrainResult:  # fmt: skip
    """Train a prepared run in an open run directory. The last five arguments are those of `run`."""
    config, resumed, team = prepared.config, prepared.resumed, prepared.team
    if resumed is not None and team.agree(_has_ended(resumed, run_dir.result(config))):
        result = _result(run_dir, config, resumed.checkpoint.step, History(each_row(run_dir.path / METRICS)))
        return replace(result, was_finished=True, without_effect=tuple(resumed.without_effect or ()))
    saved, num_steps = prepared.checkpoint, prepared.data.order.num_steps
    first_step = saved.step if saved else 0
    if team.is_first and (plan := prepared.memory.plan) is not None:  # before the model is loaded, which takes long
        check_space(run_dir, config, num_trained(plan.decoder, plan.ask), num_steps, first_step)
    with explained(prepared.backend, config, "while the model was loaded"):
        engine = load_engine(prepared, shared_base)
    if saved is not None:
        restore(engine, saved)
    num_weights = engine.description.trainable_parameters
    if team.is_first:
        check_space(run_dir, config, num_weights, num_steps, first_step)
    run_dir.has_begun = True
    run_dir.notes += [] if restart else suspected(run_dir, prepared.memory)  # before the timeline is continued
    _write_records(run_dir, prepared, engine)

    watchers, unusable_hooks = _watchers(prepared, run_dir, display, hooks)
    log = Metrics(run_dir.path / METRICS, prepared.backend, watchers, first_step)
    guards = Guards(config, lambda step: _sources(prepared, step), saved.state.get("guards") if saved else None)
    moments = Moments(watchers)
    recovery = recovery_of(prepared, engine, log)
    saver = Saver(run_dir, prepared, engine, guards, log, recovery, moments)
    samples = _samples(prepared, engine, run_dir.path / SAMPLES, first_step)
    info = RunInfo(
        run_dir.path, prepared.backend.name, prepared.data.order.num_steps, first_step, len(prepared.data.train),
        len(prepared.data.eval), engine.description.as_json(), num_weights * bytes_per_weight(prepared.optimizer),
    )  # fmt: skip
    try:
        watchers.tell("on_start", info)
        for problem in unusable_hooks:
            log.event(Event(first_step, "hook_failed", problem))
        _tell_what_was_found(prepared, run_dir, log, engine)
        if restart is not None:
            resume_smaller(restart, recovery, prepared, first_step, log)
        with Ahead(lambda step: prepared.batches(step, recovery.layout), prepared.data.order.num_steps) as batches:
            recovery.on_change = batches.drop
            job = Job(prepared, engine, watchers, log, guards, saver, recovery, moments, batches, samples, pause_after)
            num_steps = fit(job, first_step)
        saver.check_files(num_steps)
        with _in_result(prepared, engine, saver, log, num_steps):
            verdict = _verdict(log.history)
            log.event(Event(num_steps, "verdict", str(verdict), {"verdict": verdict.word}))
            moments.enter(num_steps, FINGERPRINTS)
            prints = _fingerprints(prepared, engine)  # with a sharded base, all processes compute them together
            moments.enter(num_steps, RESULT)
            if team.is_first:
                record = _record(prepared, engine, log, guards, recovery, num_steps) | {"fingerprints": prints}
                _write_result(run_dir.result(config), prepared, engine, record)
        if config.run.report and team.is_first:
            _write_report(display, run_dir.path, log, num_steps)
        if config.run.track:
            moments.enter(num_steps, TRACKERS)
    except Preempted as stop:
        raise (_stopped(stop, saver) if team.is_first else stop) from None
    finally:
        log.write_rest()
        watchers.end()
        log.close()
        saver.close()
    if saver.newest is None and saver.failure is not None:
        raise DiskError(f"{saver.failure} No checkpoint could be saved; the result is in {run_dir.result(config)}")
    if team.is_first:
        display.log_result(run_dir.path, run_dir.result(config))
    return _result(run_dir, config, num_steps, log.history)


def _watchers(
    prepared: Prepared, run_dir: RunDir, display: Display, hooks: Sequence[Hook]
) -> tuple[Watchers, list[str]]:
    """Return what calls the hooks: timeline of memory, display, those of the caller, the installed ones; and problems.

    Of several processes, only the first one writes the timeline, is shown, and loads the installed hooks.
    """
    if not prepared.team.is_first:
        return Watchers(hooks), []
    installed, problems = installed_hooks()
    timeline = Timeline(run_dir.path / TIMELINE, prepared.backend.memory)
    return Watchers([timeline, *display.hooks(prepared, run_dir.path), *hooks, *installed]), problems


def _samples(prepared: Prepared, engine: Engine, path: Path, first_step: int) -> Samples | None:
    """Return what answers run.sample_prompts, in the first process."""
    is_first, files = prepared.team.is_first, prepared.model
    if not (prompts := prepared.config.run.sample_prompts):
        return None
    check_not_split(engine)
    model = LoadedModel(engine, files.tokenizer, positions=position_table_size(read_config(files.directory)))
    return Samples(model, prepared.optimizer, prompts, path, first_step, prepared.system_message) if is_first else None


def _has_ended(resumed: Resumed, result: Path) -> bool:
    """Return whether no step is left, and the result is that of the last one, not of an earlier, shorter run."""
    if resumed.without_effect is None:
        return False
    try:
        manifest = read_json(result / MANIFEST_FILE, max_bytes=MAX_BYTES, is_own=True)
        return manifest["training"]["steps"] == resumed.checkpoint.step
    except (FormatError, KeyError, TypeError):
        return False


def _result(run_dir: RunDir, config: Config, num_steps: int, history: History) -> TrainResult:
    losses = (history.final_loss, history.eval_loss_before, history.eval_loss)
    page = run_dir.path / REPORT if config.run.report and (run_dir.path / REPORT).is_file() else None
    return TrainResult(run_dir.path, run_dir.result(config), num_steps, *losses, _verdict(history), page)


def _verdict(history: History) -> RunVerdict:
    return judge(history.losses, {step: record.eval_loss for step, record in history.evals.items()})


def _tell_what_was_found(prepared: Prepared, run_dir: RunDir, log: Metrics, engine: Engine) -> None:
    """Log as events what existed before the first step."""
    resumed, saved = prepared.resumed, prepared.checkpoint
    step = saved.step if saved else 0
    # A checkpoint from another directory, or one older than the newest, starts a new branch.
    is_here = saved is not None and saved.path.parent == run_dir.checkpoints
    moved = set_aside(run_dir.checkpoints, after=step if is_here else -1)
    described, weights = read_config(prepared.model.directory), prepared.model.weights
    head = untied_head(described, weights.tensors) if weights is not None else None
    notes = [*run_dir.notes, *(f"renamed to {path}: no longer part of this run" for path in moved)]
    notes += [note for note in (ignored_code(described), head) if note]
    if not prepared.spec.trains_model:
        notes += notes_before_training(prepared, engine)
    for note in notes:
        log.event(Event(step, "found", note))
    if saved is not None:
        log.event(Event(step, "resumed", f"after step {step}, from {saved.path}", {"backend": prepared.backend.name}))
    if resumed is not None and resumed.changes:
        changes = [{"key": change.what, "before": change.before, "now": change.now} for change in resumed.changes]
        text = f"the config has changed since the checkpoint:\n{table(resumed.changes)}"
        log.event(Event(step, "config_changed", text, {"changes": changes}))
    for documents in (prepared.data.train, prepared.data.eval):
        if documents.hidden is not None:
            log.event(Event(step, "activation_cache", str(documents.hidden)))
    before, threads = saved.state.get("threads") if saved else None, engine.description.threads
    if threads is not None and type(before) is int and before != threads:
        text = (
            f"{before} CPU threads before, {threads} now: sums are rounded differently, so the last digits may differ"
        )
        log.event(Event(step, "threads_changed", text, {"before": before, "now": threads}))


def _sources(prepared: Prepared, step: int) -> list[str]:
    """Return the data rows of a step, counted from 1, as path:line."""
    ids: list[int] = prepared.data.order.step(step - 1).documents.tolist()
    return [prepared.data.train[i].where for i in ids]


def _in_result(
    prepared: Prepared, engine: Engine, saver: Saver, log: Metrics, step: int
) -> AbstractContextManager[None]:
    """Use, inside the block, the weights that the run writes: of the last step, or of the best evaluation."""
    optimizer = prepared.optimizer
    best = saver.best() if prepared.config.guards.restore_best else None
    if prepared.config.guards.restore_best and best is None:
        text = "guards.restore_best: no checkpoint of the best evaluation; the adapter of the last step is written"
        log.event(Event(step, "no_best", text))
    of = step if best is None else best.step
    if optimizer.average is not None and of <= optimizer.average.start:
        text = (
            f"train.average: the tail begins after step {optimizer.average.start}; the weights of step {of} are written"
        )
        log.event(Event(step, "no_average", text))
    if best is None:
        return using_result(engine, optimizer)
    log.event(Event(step, "best_restored", f"the adapter of step {best.step}", {"from_step": best.step}))
    best = in_names_of(engine.adapter_shapes, best)
    # What was evaluated then: the result of that step, whose slots are in the same checkpoint.
    return using(engine, result_of(optimizer, best.adapter, best.optimizer))


def _stopped(stop: Preempted, saver: Saver) -> Exception:
    """Return the error for a run that a signal stopped."""
    if saver.failure is not None:
        kept = f"the newest checkpoint is {saver.newest}" if saver.newest else "there is no checkpoint"
        return DiskError(f"{stop}, but the state could not be saved; {kept}. {saver.failure}")
    return type(stop)(f"{stop}; saved in {saver.newest}")


def _write_records(run_dir: RunDir, prepared: Prepared, engine: Engine) -> None:
    found = environment(prepared.backend, engine.description.as_json()) | start()
    found |= {"processes": prepared.team.size, "memory": prepared.memory.as_json()}
    decode = prepared.model.tokenizer.decode_all
    found["data"] = counts(prepared.config, prepared.data.train, prepared.data.eval, decode)
    found |= {"num_steps": prepared.data.order.num_steps, "fingerprints": prepared.fingerprints}
    run_dir.records = {CONFIG: to_yaml(prepared.config), ENVIRONMENT: json.dumps(found, indent=2) + "\n"}
    if (template := prepared.model.tokenizer.template) is not None:  # data.template may name a file of this machine
        run_dir.records[TEMPLATE_FILE] = template.source
    for name, text in run_dir.records.items():
        write_file(run_dir.path / name, text)


def _record(
    prepared: Prepared, engine: Engine, log: Metrics, guards: Guards, recovery: Recovery, num_steps: int
) -> dict[str, Any]:
    """Return what dualtune.json says of the base model and of the training."""
    config, verdict = prepared.config, _verdict(log.history)
    return {
        "base": prepared.model.identity
        | {
            "name": config.model.name,
            "loaded_as": engine.description.quantization,
            "init": config.model.init,
        },
        "training": {
            "backend": prepared.backend.name,
            "steps": num_steps,
            "skipped_steps": guards.state.num_skipped,
            "seed": config.run.seed,
            "final_loss": _finite(log.history.final_loss),
            "eval_loss_before": _finite(log.history.eval_loss_before),
            "eval_loss": _finite(log.history.eval_loss),
            "verdict": {"word": verdict.word, "because": verdict.because},
            "best_step": guards.state.best_step,
            "best_eval_loss": guards.state.best_loss,
            "train_documents": len(prepared.data.train),
            "template_hash": prepared.model.tokenizer.template_hash,
            SYSTEM_MESSAGE: prepared.system_message,  # `dualtune chat` asks with it
            "template": "chat" if prepared.model.tokenizer.template else "none",  # `dualtune generate` reads it
            **entry_of(recovery, prepared),
        },
    }  # fmt: skip


def _write_result(path: Path, prepared: Prepared, engine: Engine, record: dict[str, Any]) -> None:
    if path.exists():  # the result of the finished run that is continued here; its checkpoints remain
        remove_directory(path)
    source = template.source if (template := prepared.model.tokenizer.template) else None
    if prepared.config.adapter.trains_model:
        write_model(path, engine, source, record)
    else:
        write_adapter(path, trained_adapter(prepared, engine.adapter_state(), source), metadata=record)


def _fingerprints(prepared: Prepared, engine: Engine) -> dict[str, Any]:
    """Return what the result computes; of an adapter, beside the base without it."""
    tokenizer = prepared.model.tokenizer
    if prepared.spec.trains_model:
        return {"model": fingerprints(engine, tokenizer)}
    return {"base": base_fingerprints(engine, tokenizer), "adapter": fingerprints(engine, tokenizer)}


def _write_report(display: Display, path: Path, log: Metrics, step: int) -> None:
    """Write the page of the run. The result is on disk, so a page that cannot be written is no reason to fail."""
    try:
        display.write_report(path)
    except Exception as error:  # noqa: BLE001  whatever is wrong with the page, the run is done
        log.event(Event(step, "report_failed", f"{REPORT} was not written: {type(error).__name__}: {error}"))


def _finite(value: float | None) -> float | None:
    """Return None for NaN and Inf, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
