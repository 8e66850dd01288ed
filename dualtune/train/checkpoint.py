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

import dataclasses
import hashlib
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors.numpy import save as to_bytes

from dualtune import faults
from dualtune.adapter import fields
from dualtune.adapter.files import read_json, read_safetensors
from dualtune.adapter.spec import Tensors
from dualtune.backend import Engine, OptimizerState
from dualtune.disk import json_bytes, listing, remove_directory, write_directory
from dualtune.errors import DiskError, FormatError, NonFiniteError
from dualtune.train.guards import GuardState

SCHEMA_VERSION = 2  # 1 had no fingerprints and no guards
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 1 << 20
MAX_STATE_BYTES = 4 << 20
MAX_STEP = 10**12
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
    state = _read_state(path)
    adapter = read_safetensors(path / "adapter.safetensors")
    m, v = (read_safetensors(path / f"optimizer_{part}.safetensors") for part in "mv")
    shapes = [{name: x.shape for name, x in tensors.items()} for tensors in (adapter, m, v)]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        raise FormatError(f"{path}: the adapter and the moments of its optimizer are not of the same tensors")
    return Checkpoint(path, state["step"], adapter, OptimizerState(state["optimizer_step"], m, v), state)


def _read_state(path: Path) -> dict[str, Any]:
    """state.json, with what others take from it in the types that they take it for. It may come from elsewhere."""
    file = path / "state.json"
    state = read_json(file, max_bytes=MAX_STATE_BYTES)
    for key in ("step", "optimizer_step"):
        if type(value := fields.required(state, key, file)) is not int or not 0 <= value < MAX_STEP:
            raise fields.wrong(file, key, value, "a number of steps")
    fields.required(state, "config", file)
    for section in fields.subtable(state, "config", file):
        fields.subtable(state["config"], section, f"{file}: config")
    for key, value in fields.subtable(state, "fingerprints", file).items():
        if not isinstance(value, str):
            raise fields.wrong(f"{file}: fingerprints", key, value, "a text")
    for key in ("place", "schedule", "guards"):
        fields.subtable(state, key, file)
    _check_guards(state.get("guards") or {}, f"{file}: guards")
    return state


def _check_guards(guards: Mapping[str, Any], where: str) -> None:
    known = dataclasses.asdict(GuardState())
    for key in guards:
        value: Any = guards[key]
        if key == "losses":
            is_right = _are_numbers(value)
        elif key == "in_spike":
            is_right = isinstance(value, bool)
        else:  # a step, a count or a loss; null where there is none yet
            is_right = key in known and (_is_number(value) or (value is None and known[key] is None))
        if not is_right:
            raise fields.wrong(where, key, value, "what the guards of a run remember")


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_number, cast("list[Any]", values)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


FILES = frozenset({"adapter.safetensors", "optimizer_m.safetensors", "optimizer_v.safetensors", "state.json"})


def problem_of(path: Path) -> str | None:
    """What is wrong with a checkpoint: every file of the manifest must be there with its size and hash."""
    try:
        if not (path / MANIFEST).exists():
            return f"{MANIFEST} is missing"
        manifest = read_json(path / MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
        version, files = manifest["schema_version"], manifest["files"]
        if version > SCHEMA_VERSION:
            newer = fields.shown(fields.text_of(version))
            return f"has schema version {newer}, this dualtune reads up to {SCHEMA_VERSION}: upgrade it"
        if missing := FILES - {*files}:
            return f"{MANIFEST} does not list {', '.join(sorted(missing))}"
        if foreign := {*files} - FILES:  # it may come from elsewhere, and name any file of this machine
            names = ", ".join(repr(fields.shown(name)) for name in sorted(foreign)[:8])
            return f"{MANIFEST} lists {names}, which a checkpoint does not have"
        return next(filter(None, (_problem_of_file(path / name, entry) for name, entry in files.items())), None)
    except FormatError as error:
        return f"{MANIFEST} is not a manifest ({str(error).removeprefix(f'{path / MANIFEST}: ')})"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not a manifest"


def _problem_of_file(file: Path, entry: Mapping[str, Any]) -> str | None:
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            said = fields.shown(fields.text_of(entry["bytes"]))
            return f"{file.name} has {size} bytes, and the manifest says {said}"
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
