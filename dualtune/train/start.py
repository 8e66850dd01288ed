"""The start of a run: its engine is loaded and tried, and the facts before the first step are recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping

from dualtune.base.files import write_file
from dualtune.config import to_yaml
from dualtune.config.rates import far_rate
from dualtune.data.documents import Show
from dualtune.data.preview import counts
from dualtune.engine.backend import Engine, LoadRequest, SharedBase
from dualtune.model.config_file import ignored_code, read_config
from dualtune.model.embeddings import untied_head
from dualtune.model.formats.chat_template import TEMPLATE_FILE
from dualtune.model.formats.naming import Naming
from dualtune.train.activation_cache import check_layers, use_cache
from dualtune.train.generation.inference import load_adapter
from dualtune.train.hooks import Event
from dualtune.train.memory import agreed
from dualtune.train.model_checks import check_causality, check_packing, why_not_shared
from dualtune.train.objective import update_settings
from dualtune.train.objectives.comparison import AnswerComparison, comparison_of
from dualtune.train.objectives.served_teacher import same_teacher
from dualtune.train.objectives.teachers import Teacher
from dualtune.train.prepare import Prepared
from dualtune.train.state.checkpoint import Checkpoint, set_aside
from dualtune.train.state.metrics import Metrics
from dualtune.train.state.records import environment, start
from dualtune.train.state.resume import TEACHER_PROBE, table
from dualtune.train.state.run_dir import CONFIG, ENVIRONMENT, RunDir


def load_engine(prepared: Prepared, shared_base: SharedBase | None = None) -> Engine:
    """Load the base model with the adapter that training starts from."""
    config = prepared.config
    engine = prepared.backend.load(
        LoadRequest.of(
            config,
            model_dir=prepared.model.directory,
            adapter=prepared.spec,
            optimizer=prepared.optimizer,
            longest=prepared.data.longest,
            checkpointing=agreed(prepared.memory.checkpointing, prepared.team),
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
    # The checks above ran the model as it is. From here on its documents may have their hidden states below the lowest
    # adapter from the disk, where they are computed now unless they are there.
    if config.train.activation_cache == "disk":
        check_layers(engine.description.layers_below_adapter, prepared.spec.targets, prepared.spec.layers)
        parts = [prepared.data.train, prepared.data.eval]
        use_cache(engine, prepared.backend, parts, _base(prepared), prepared.team, packs=config.data.packing)
    if config.data.packing:  # after the cache, which holds whole documents
        share_beginnings(engine, prepared)
    if prepared.teaching is not None:
        _start_teacher(prepared.teaching.teacher, engine, prepared)
    return engine


def _start_teacher(teacher: Teacher, engine: Engine, prepared: Prepared) -> None:
    """Prepare the teacher. ConfigError if the checkpoint that is resumed had another one."""
    teacher.start(engine, prepared.spec)
    if teacher.probe is not None:
        before: dict[str, str] = prepared.resumed.checkpoint.state.get("fingerprints", {}) if prepared.resumed else {}
        prepared.fingerprints[TEACHER_PROBE] = same_teacher(before.get(TEACHER_PROBE), teacher.probe)


def share_beginnings(engine: Engine, prepared: Prepared) -> None:
    """Compute what the answers to a prompt have in common once, if this engine can, in all processes alike."""
    both = (prepared.data.train, prepared.data.eval)
    parts = [part for part in both if part.beginnings is not None and part.beginnings.any()]
    if prepared.rollouts is not None:  # the samples of a step are made as the documents are
        parts = [prepared.data.train]
    if not parts:
        return
    reason = why_not_shared(engine, prepared.backend)
    if prepared.team.agree(reason is not None):
        reason = reason or "another process cannot compute it once"
    for documents in parts:
        documents.shares, documents.why_not_shared = reason is None, reason or ""


def load_comparison(
    prepared: Prepared, engine: Engine, show: Show = lambda what, share: None
) -> AnswerComparison | None:
    """Return the objective of preference training with its reference, by a new engine; None for sft."""
    if prepared.objective is None:
        return None
    parts = (prepared.data.train, prepared.data.eval)
    return comparison_of(
        engine, prepared.backend, prepared.config, prepared.objective, parts, _base(prepared), prepared.team, show
    )


def _base(prepared: Prepared) -> dict[str, str]:
    """Return what tells the base model from others."""
    config, names = prepared.config, ("base model's config", "base model's tensors")
    base = {name: prepared.fingerprints[name] for name in names} | {"init": config.model.init}
    return base | ({"seed": str(config.run.seed)} if config.model.init == "random" else {})


def write_records(run_dir: RunDir, prepared: Prepared, engine: Engine) -> None:
    """Write the config and environment.json, and keep what is written, to restore files that somebody changes."""
    data = prepared.data
    record = environment(prepared.backend, engine.description.as_json()) | start()
    record |= {
        "processes": prepared.team.size,
        "memory": prepared.memory.as_json(),
        "data": counts(prepared.config, data.train, data.eval, prepared.model.tokenizer.decode_all),
        "num_steps": data.order.num_steps,
        "fingerprints": prepared.fingerprints,
    }
    run_dir.records = {CONFIG: to_yaml(prepared.config), ENVIRONMENT: json.dumps(record, indent=2) + "\n"}
    if (template := prepared.model.tokenizer.template) is not None:  # data.template may name a file of this machine
        run_dir.records[TEMPLATE_FILE] = template.source
    for name, text in run_dir.records.items():
        write_file(run_dir.path / name, text)


def _goes_on_with(start: Checkpoint, settings: Mapping[str, float | None]) -> str:
    """Return the note on an optimizer that another run began, with the constants that have changed."""
    text = f"continues with the optimizer of {start.path}, after {start.optimizer.step} updates"
    before: Mapping[str, float | None] = start.state.get("updates", {})
    changes = [
        f"{name} {json.dumps(value)} instead of {json.dumps(before[name])}"
        for name, value in settings.items()
        if name in before and before[name] != value
    ]
    return f"{text}; these of its constants have changed: {', '.join(changes)}" if changes else text


def log_start(prepared: Prepared, run_dir: RunDir, log: Metrics, engine: Engine, naming: Naming | None) -> None:
    """Log as events what existed before the first step. `naming`: of the adapter, with notes."""
    resumed, saved = prepared.resumed, prepared.checkpoint
    step = saved.step if saved else 0
    # A checkpoint from another directory, or one older than the newest, starts a new branch.
    is_here = saved is not None and saved.path.parent == run_dir.checkpoints
    moved = set_aside(run_dir.checkpoints, after=step if is_here else -1)
    described, weights = read_config(prepared.model.directory), prepared.model.weights
    head = untied_head(described, weights.tensors) if weights is not None else None
    notes = [*run_dir.notes, *(f"renamed to {path}: no longer part of this run" for path in moved)]
    notes += [note for note in (ignored_code(described), head) if note]
    if (start := prepared.start_state) is not None:
        notes.append(_goes_on_with(start, update_settings(prepared.config, prepared.data.order.num_steps)))
    notes += naming.notes if naming else ()
    if rate := far_rate(prepared.config):
        notes.append(rate)
    if reason := prepared.data.train.why_not_shared:
        notes.append(f"a prompt is computed for each of its answers: {reason}")
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
