"""A run: from a config to a run directory with an adapter in it."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import dualtune
from dualtune.adapter.directory import Adapter, write_adapter
from dualtune.adapter.spec import ALL_LINEAR, LoraSpec, Tensors, modules_of
from dualtune.backend import Backend, Engine, LoadRequest
from dualtune.base_model import fingerprint
from dualtune.config import Config, to_yaml
from dualtune.errors import ConfigError, DiskError
from dualtune.hooks import Hook, RunInfo
from dualtune.train import checkpoint
from dualtune.train.fingerprints import base_fingerprints, fingerprints
from dualtune.train.inference import load_adapter
from dualtune.train.metrics import Metrics
from dualtune.train.prepare import Prepared, prepare
from dualtune.train.trainer import Job, fit

# Versions worth knowing when two machines disagree.
RECORDED_PACKAGES = (
    "dualtune", "numpy", "tokenizers", "transformers", "torch", "bitsandbytes", "accelerate", "mlx", "mlx-lm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run left behind."""

    run_dir: Path
    adapter_dir: Path
    num_steps: int
    final_loss: float
    eval_loss_before: float | None
    eval_loss: float | None


def load_engine(prepared: Prepared) -> Engine:
    """Load the base model with the adapter that training starts from."""
    config = prepared.config
    engine = prepared.backend.load(
        LoadRequest(
            model_dir=prepared.model_dir,
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            init=config.model.init,
            adapter=prepared.spec,
            weight_decay=config.train.weight_decay,
            seed=config.run.seed,
            longest=max(len(document.tokens) for document in (*prepared.train.items, *prepared.eval.items)),
        )
    )
    if prepared.start is not None:
        load_adapter(engine, prepared.start, config.model.name)
    return engine


def run(config: Config, backend: Backend, hooks: Sequence[Hook] = (), *, resume: bool = False) -> TrainResult:
    """Train by a config on a backend. `resume` continues from the newest checkpoint of the run directory."""
    run_dir = Path(config.run.dir).expanduser()
    refuse_existing(run_dir, resume)
    return execute(prepare(config, backend), hooks, resume=resume)


def refuse_existing(run_dir: Path, resume: bool) -> None:
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())) and not resume:
        raise ConfigError(
            f"run.dir: {run_dir} already holds something. Choose another with --set run.dir=…, or continue that run "
            "with --resume"
        )


def execute(prepared: Prepared, hooks: Sequence[Hook] = (), *, resume: bool = False) -> TrainResult:
    """Train what `prepare` prepared."""
    config, run_dir = prepared.config, Path(prepared.config.run.dir).expanduser()
    saved = checkpoint.latest(run_dir / "checkpoints", config) if resume else None
    if saved is not None and saved.step >= prepared.order.num_steps and (run_dir / "adapter").exists():
        raise ConfigError(f"run.dir: {run_dir} holds a run that is finished, after {saved.step} steps")
    engine = load_engine(prepared)
    first_step = 0
    if saved is not None:
        engine.load_adapter_state(saved.adapter)
        engine.load_optimizer_state(saved.optimizer)
        first_step = saved.step
    _write_run_dir(run_dir, prepared, engine)

    job = Job(
        config, prepared.backend, engine, prepared.order, prepared.train.items, prepared.eval.items,
        prepared.micro_batch_tokens, hooks,
    )  # fmt: skip
    info = RunInfo(
        run_dir, prepared.backend.name, prepared.order.num_steps, first_step,
        len(prepared.train.items), len(prepared.eval.items), engine.description,
    )  # fmt: skip
    adapter_dir = run_dir / "adapter"
    metrics = Metrics(run_dir / "metrics.jsonl", prepared.backend, hooks, first_step)

    def save(step: int) -> None:
        checkpoint.save(run_dir / "checkpoints", step, engine, config, keep=config.run.keep)

    try:
        for hook in hooks:
            hook.on_start(info)
        fit(job, metrics, save, first_step)
        _write_adapter(adapter_dir, prepared, engine, metrics)
    finally:
        metrics.close()
        for hook in hooks:
            hook.on_end()
    return TrainResult(
        run_dir, adapter_dir, job.order.num_steps, metrics.final_loss, metrics.eval_loss_before, metrics.eval_loss
    )


def _write_run_dir(run_dir: Path, prepared: Prepared, engine: Engine) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(prepared.config), encoding="utf-8")
        text = json.dumps(environment(prepared.backend, engine.description), indent=2)
        (run_dir / "environment.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"run.dir: {run_dir} cannot be written: {error.strerror}") from error


def environment(backend: Backend, engine: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader of the results needs to know about the machine; nothing about its user."""
    versions: dict[str, str] = {}
    for package in RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "dualtune": dualtune.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "backend": backend.name,
        "devices": [{"name": d.name, "kind": d.kind, "total_bytes": d.total_bytes} for d in backend.devices()],
        "engine": dict(engine),
        "packages": versions,
    }


def _write_adapter(path: Path, prepared: Prepared, engine: Engine, metrics: Metrics) -> None:
    config = prepared.config
    record = {
        "base": fingerprint(prepared.model_dir)
        | {"name": config.model.name, "loaded_as": engine.description["quantization"]},
        "training": {
            "backend": prepared.backend.name,
            "steps": prepared.order.num_steps,
            "seed": config.run.seed,
            "final_loss": metrics.final_loss,
            "eval_loss_before": metrics.eval_loss_before,
            "eval_loss": metrics.eval_loss,
            "train_documents": len(prepared.train.items),
            "template": "chat" if prepared.tokenizer.template else "none",  # `dualtune generate` follows it
        },
        "fingerprints": {
            "base": base_fingerprints(engine, prepared.tokenizer),
            "adapter": fingerprints(engine, prepared.tokenizer),
        },
    }  # fmt: skip
    tensors = engine.adapter_state()
    adapter = Adapter(_written_spec(prepared, tensors), tensors, config.model.name)
    if path.exists():  # of the finished run that is continued here; its checkpoints remain
        shutil.rmtree(path)
    write_adapter(path, adapter, metadata=record)


def _written_spec(prepared: Prepared, tensors: Tensors) -> LoraSpec:
    """The spec with targets that a reader knows: short names rather than our "all-linear" or a list of every module."""
    if prepared.start is not None:
        return replace(prepared.spec, targets=prepared.start.spec.targets)
    if prepared.spec.targets == (ALL_LINEAR,):
        return replace(prepared.spec, targets=tuple(sorted({m.split(".")[-1] for m in modules_of(tensors)})))
    return prepared.spec
