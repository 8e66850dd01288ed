"""The result of a run: the adapter, or if all parameters are trained a model directory, which loads like its base.

config.json, tokenizer, chat template  as in the base, or as in the training; they name where it stops
model.safetensors                      the trained parameters, in float32: whoever loads them rounds once
dualtune.json                          the base, the training, and fingerprints of what the model computes
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.errors import EnvironmentFault, FormatError
from dualtune.base.files import json_bytes, new_directory, remove_directory
from dualtune.base.untrusted import read_json
from dualtune.config import Config
from dualtune.data.system_message import KEY as SYSTEM_MESSAGE
from dualtune.data.tokens.stop_tokens import write_stop_tokens
from dualtune.engine.backend import Engine
from dualtune.engine.peft_trial import named
from dualtune.model.adapter import Tensors, modules_of
from dualtune.model.beside import NewToken
from dualtune.model.config_file import read_config
from dualtune.model.formats.chat_template import write_training_template
from dualtune.model.formats.directory import (
    MANIFEST_FILE,
    MAX_BYTES,
    NEW_TOKENS,
    SPECIAL_TOKENS,
    TOKENIZER_FILES,
    Adapter,
    write_adapter,
)
from dualtune.model.formats.naming import Naming, is_fan_in_fan_out
from dualtune.model.targets import ALL_LAYERS, ALL_LINEAR, lacks
from dualtune.train.evaluation import result_of, using, using_result
from dualtune.train.fingerprints import base_fingerprints, fingerprints
from dualtune.train.guards import Guards
from dualtune.train.health import RunVerdict
from dualtune.train.hooks import Event
from dualtune.train.memory import entry_of
from dualtune.train.prepare import Prepared, Resumed
from dualtune.train.recovery import Recovery
from dualtune.train.saver import Saver
from dualtune.train.state.checkpoint import in_names_of
from dualtune.train.state.metrics import History, Metrics
from dualtune.train.state.resume import Change
from dualtune.train.state.run_dir import REPORT, RunDir
from dualtune.train.verdict import verdict_of


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


def result_at(run_dir: RunDir, config: Config, num_steps: int, history: History) -> TrainResult:
    """Return the result of a run after this many steps, from what it has logged."""
    losses = (history.final_loss, history.eval_loss_before, history.eval_loss)
    page = run_dir.path / REPORT if config.run.report and (run_dir.path / REPORT).is_file() else None
    return TrainResult(run_dir.path, run_dir.result(config), num_steps, *losses, verdict_of(history), page)


def has_result(resumed: Resumed, result: Path) -> bool:
    """Return whether no step is left, and the result is that of the last one, not of an earlier, shorter run."""
    if resumed.without_effect is None:
        return False
    try:
        manifest = read_json(result / MANIFEST_FILE, max_bytes=MAX_BYTES, is_own=True)
        return manifest["training"]["steps"] == resumed.checkpoint.step
    except (FormatError, KeyError, TypeError):
        return False


def in_result(
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


def result_fingerprints(prepared: Prepared, engine: Engine) -> dict[str, Any]:
    """Return what the result computes; of an adapter, beside the base without it."""
    tokenizer = prepared.model.tokenizer
    if prepared.spec.trains_model:
        return {"model": fingerprints(engine, tokenizer)}
    return {"base": base_fingerprints(engine, tokenizer), "adapter": fingerprints(engine, tokenizer)}


def result_record(
    prepared: Prepared, engine: Engine, log: Metrics, guards: Guards, recovery: Recovery, num_steps: int
) -> dict[str, Any]:
    """Return what dualtune.json says of the base model and of the training."""
    config, verdict = prepared.config, verdict_of(log.history)
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
            "objective": config.train.objective,
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
        **_tokens_entry(config.data.added_tokens),
    }  # fmt: skip


def _tokens_entry(tokens: Sequence[NewToken]) -> dict[str, Any]:
    special = [token.text for token in tokens if token.special]
    return {
        **({NEW_TOKENS: [token.text for token in tokens]} if tokens else {}),
        **({SPECIAL_TOKENS: special} if special else {}),
    }


def write_result(path: Path, prepared: Prepared, engine: Engine, naming: Naming | None, record: dict[str, Any]) -> None:
    """Write the result. `naming`: of `adapter_naming`, for an adapter."""
    if path.exists():  # the result of the finished run that is continued here; its checkpoints remain
        remove_directory(path)
    source = template.source if (template := prepared.model.tokenizer.template) else None
    if naming is None:
        write_model(path, engine, source, record)
    else:
        adapter = replace(_adapter(prepared, engine.adapter_state()), template=source, naming=naming)
        if prepared.config.data.added_tokens:
            paths = [prepared.model.directory / name for name in TOKENIZER_FILES]
            adapter = replace(adapter, tokenizer={path.name: path.read_bytes() for path in paths if path.is_file()})
        write_adapter(path, adapter, metadata=record)


def write_model(path: Path, engine: Engine, template: str | None, record: Mapping[str, Any]) -> None:
    """Write the trained model, whole or not at all. `template`: the source of its training's chat template."""
    with new_directory(path.resolve(), by_library=True) as directory:
        engine.save_merged(directory)
        write_training_template(directory, template, record)
        with contextlib.suppress(EnvironmentFault):  # a tokenizer of another kind
            write_stop_tokens(directory)
        (directory / MANIFEST_FILE).write_bytes(json_bytes(record))


def adapter_naming(prepared: Prepared, engine: Engine) -> Naming | None:
    """Return how other tools name the adapted layers, and what PEFT will not load; None if the whole model is trained.

    Names and shapes decide it, so it is known before training: an array of one number takes any shape without memory.
    """
    if prepared.spec.trains_model:
        return None
    empty = {name: np.broadcast_to(np.float32(0), shape) for name, shape in engine.adapter_shapes.items()}
    return named(_adapter(prepared, empty), prepared.model.directory).naming


def _adapter(prepared: Prepared, tensors: Tensors) -> Adapter:
    """Return the adapter with short target names instead of "all-linear" or a list of all modules."""
    spec, modules = prepared.spec.plain, modules_of(tensors)
    if prepared.start is not None:
        spec = replace(spec, targets=prepared.start.spec.targets)
    elif spec.layers != ALL_LAYERS:
        spec = replace(spec, targets=tuple(modules), layers=ALL_LAYERS)
    elif spec.targets == (ALL_LINEAR,) or lacks(modules, spec.targets):
        spec = replace(spec, targets=tuple(sorted({module.split(".")[-1] for module in modules})))
    is_transposed = is_fan_in_fan_out(read_config(prepared.model.directory))
    return Adapter(spec, tensors, prepared.config.model.name, fan_in_fan_out=is_transposed)


def _finite(value: float | None) -> float | None:
    """Return None for NaN and Inf, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
