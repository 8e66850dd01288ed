"""Checkpoints: the whole training state in a directory of safetensors and JSON, with no word about the backend.

    adapter.safetensors        PEFT names, float32
    optimizer_m.safetensors    AdamW's moments in the same names
    optimizer_v.safetensors
    state.json                 step, place in the data, guards, config, fingerprints of base model, tokenizer and data
    MANIFEST.json              schema version; size and sha256 of each other file

A checkpoint exists whole or not at all. The newest one is found by looking, never from a pointer or a file's date, and
only counts if its manifest is true.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as to_bytes

from dualtune import faults
from dualtune.adapter.files import read_safetensors
from dualtune.adapter.spec import Tensors
from dualtune.backend import Engine, OptimizerState
from dualtune.disk import json_bytes, listing, remove_directory, write_directory
from dualtune.errors import DiskError, FormatError, NonFiniteError

SCHEMA_VERSION = 2  # 1 had no fingerprints and no guards
MANIFEST = "MANIFEST.json"
BYTES_PER_WEIGHT = 12  # float32: the weight and its two moments
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A training state. `state` is what state.json holds."""

    path: Path
    step: int  # optimizer steps done
    adapter: Tensors
    optimizer: OptimizerState
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in a listing."""

    path: Path
    step: int
    num_bytes: int
    problem: str | None  # what is wrong with it


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def save(directory: Path, step: int, engine: Engine, state: Mapping[str, Any]) -> Path:
    """Write the state after `step` steps. DiskError if that fails; NonFiniteError if it is not worth keeping."""
    adapter, optimizer = engine.adapter_state(), engine.optimizer_state()
    for name, tensor in (*adapter.items(), *optimizer.m.items(), *optimizer.v.items()):
        if not np.isfinite(tensor).all():
            raise NonFiniteError(f"step {step}: {name} holds NaN or Inf. Nothing was saved. Lower train.learning_rate")
    files = {
        "adapter.safetensors": to_bytes(adapter),
        "optimizer_m.safetensors": to_bytes(optimizer.m),
        "optimizer_v.safetensors": to_bytes(optimizer.v),
        "state.json": json_bytes({"step": step, "optimizer_step": optimizer.step, **state}),
    }
    files[MANIFEST] = json_bytes({"schema_version": SCHEMA_VERSION, "step": step, "files": listing(files)})
    path = path_of(directory, step)
    write_directory(path, files)
    return path


def prune(directory: Path, keep: int, protected: Collection[int]) -> None:
    """Remove all but the newest `keep` checkpoints (two at least) and the protected steps. Raises DiskError."""
    for path, step in _directories(directory)[max(keep, 2) :]:
        if step not in protected:
            faults.reach("prune")
            remove_directory(path)
            faults.reach("pruned")


def steps(directory: Path) -> list[int]:
    """The steps of all checkpoints of a directory, newest first. They are not verified."""
    return [step for _, step in _directories(directory)]


def total_bytes(directory: Path) -> int:
    """What the checkpoints of a directory take on disk."""
    return sum(_num_bytes(path) for path, _ in _directories(directory))


def entries(directory: Path) -> list[Entry]:
    """Every checkpoint of a directory, verified, newest first."""
    return [Entry(path, step, _num_bytes(path), problem_of(path)) for path, step in _directories(directory)]


def newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """(the newest checkpoint that verifies, what is wrong with each newer one)."""
    passed_over: list[str] = []
    for path, _ in _directories(directory):
        try:
            return read(path), passed_over
        except FormatError as problem:
            passed_over.append(str(problem))
    return None, passed_over


def set_aside(directory: Path, after: int) -> list[Path]:
    """Take checkpoints of later steps out of the way, damaged or from a branch that was left. None is removed."""
    moved: list[Path] = []
    for path, step in _directories(directory):
        if step > after:
            number = next(n for n in range(1, 10**6) if not (directory / f"{path.name}.old-{n}").exists())
            try:
                moved.append(path.rename(directory / f"{path.name}.old-{number}"))
            except OSError as error:
                raise DiskError(f"{path}: cannot be set aside: {error.strerror}") from error
    return moved


def read(path: Path) -> Checkpoint:
    """A checkpoint that verifies, or FormatError that says what is wrong with it."""
    if problem := problem_of(path):
        raise FormatError(f"{path}: {problem}")
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    m, v = (read_safetensors(path / f"optimizer_{part}.safetensors") for part in "mv")
    optimizer = OptimizerState(state["optimizer_step"], m, v)
    return Checkpoint(path, state["step"], read_safetensors(path / "adapter.safetensors"), optimizer, state)


FILES = frozenset({"adapter.safetensors", "optimizer_m.safetensors", "optimizer_v.safetensors", "state.json"})


def problem_of(path: Path) -> str | None:
    """What is wrong with a checkpoint: every file of the manifest must be there with its size and hash."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version, files = manifest["schema_version"], manifest["files"]
        if version > SCHEMA_VERSION:
            return f"has schema version {version}, this dualtune reads up to {SCHEMA_VERSION}: upgrade it"
        if missing := FILES - {*files}:
            return f"{MANIFEST} does not list {', '.join(sorted(missing))}"
        if foreign := {*files} - FILES:  # it may come from elsewhere, and name any file of this machine
            return f"{MANIFEST} lists {', '.join(map(repr, sorted(foreign)))}, which a checkpoint does not have"
        return next(filter(None, (_problem_of_file(path / name, entry) for name, entry in files.items())), None)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not a manifest"


def _problem_of_file(file: Path, entry: Mapping[str, Any]) -> str | None:
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            return f"{file.name} has {size} bytes, and the manifest says {entry['bytes']}"
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return None if digest == entry["sha256"] else f"{file.name} is damaged: its sha256 is not the manifest's"


def _directories(directory: Path) -> list[tuple[Path, int]]:
    """(path, step) of what is named as a checkpoint, newest first."""
    found = [(path, match) for path in directory.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(((path, int(match[1])) for path, match in found), key=lambda item: -item[1])


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else 0
