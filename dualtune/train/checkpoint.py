"""Checkpoints: the whole training state in a directory of safetensors and JSON, with no word about the backend.

A checkpoint exists whole or not at all. The newest one is found by looking, never from a pointer, and only counts if
its manifest is true.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import save as to_bytes

from dualtune.adapter.directory import write_directory
from dualtune.adapter.files import read_safetensors
from dualtune.adapter.spec import Tensors
from dualtune.backend import Engine, OptimizerState
from dualtune.config import Config
from dualtune.errors import ConfigError

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MANIFEST = "MANIFEST.json"
# A run cannot go on with another value of these; the others may change.
FIXED_SECTIONS = ("model", "adapter", "data", "train")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int  # optimizer steps done
    adapter: Tensors
    optimizer: OptimizerState


def save(directory: Path, step: int, engine: Engine, config: Config, *, keep: int) -> Path:
    """Write the state after `step` steps, then remove all but the newest `keep` checkpoints (two at least)."""
    path = directory / f"step-{step:08d}"
    optimizer = engine.optimizer_state()
    state = {"step": step, "optimizer_step": optimizer.step, "config": _fixed(config)}
    files = {
        "adapter.safetensors": to_bytes(engine.adapter_state()),
        "optimizer_m.safetensors": to_bytes(optimizer.m),
        "optimizer_v.safetensors": to_bytes(optimizer.v),
        "state.json": json.dumps(state, indent=2).encode(),
    }
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    manifest = {"schema_version": SCHEMA_VERSION, "step": step, "files": listed}
    files[MANIFEST] = json.dumps(manifest, indent=2).encode()
    if path.exists():  # a resumed run passes here again
        shutil.rmtree(path)
    write_directory(path, files)
    for old in sorted(directory.glob("step-*"))[: -max(keep, 2)]:
        shutil.rmtree(old)
    return path


def latest(directory: Path, config: Config) -> Checkpoint | None:
    """The newest valid checkpoint, or None. ConfigError if it belongs to another model, adapter, data or training."""
    path = None
    for candidate in sorted(directory.glob("step-*"), reverse=True):
        if is_valid(candidate):
            path = candidate
            break
        log.warning("%s is damaged or incomplete, and is passed over", candidate)
    if path is None:
        return None
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    changed = [
        f"{key}: got {new!r}, the checkpoint was made with {old!r}"
        for key, old, new in _differences(state["config"], _fixed(config))
    ]
    if changed:
        raise ConfigError("\n".join(changed) + f"\n{path} cannot be continued with another config.")
    m, v = (read_safetensors(path / f"optimizer_{part}.safetensors") for part in "mv")
    optimizer = OptimizerState(state["optimizer_step"], m, v)
    return Checkpoint(path, state["step"], read_safetensors(path / "adapter.safetensors"), optimizer)


def is_valid(path: Path) -> bool:
    """Whether every file of the manifest is there with its size and hash."""
    try:
        files: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(_is_intact(path / name, entry) for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # gone, cut, or JSON of another shape
        return False


def _is_intact(file: Path, entry: dict[str, Any]) -> bool:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return file.stat().st_size == entry["bytes"] and digest == entry["sha256"]


def _fixed(config: Config) -> dict[str, Any]:
    kept = config.model_dump(mode="json", include=set(FIXED_SECTIONS)) | {"run": {"seed": config.run.seed}}
    del kept["train"]["micro_batch_tokens"]  # the result does not depend on it
    return kept


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for section in sorted(old.keys() | new.keys()):
        a, b = old.get(section, {}), new.get(section, {})
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                yield f"{section}.{key}", a.get(key), b.get(key)
