"""Checkpoints: the complete training state in a directory of safetensors and JSON, independent of the backend.

    adapter.safetensors        PEFT names, float32
    optimizer_SLOT.safetensors the optimizer's state in the same names: AdamW has m and v, in 8 bits m and root_v,
                               schedule-free d and v; with train.average also offset
    policy.safetensors         tensors of the step policy, if it has any
    state.json                 step, position in the data, guards, config, fingerprints of base model, tokenizer, data;
                               the constants of the updates; the number of threads on a CPU, where rounding depends on
                               it
    MANIFEST.json              schema version; size and sha256 of each other file

A checkpoint is written whole or not at all. The newest one is found by scanning the directory, never from a pointer or
a file's date, and counts only if it matches its manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import stat
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base import faults, fields
from dualtune.base.errors import DiskError, FormatError, NonFiniteError
from dualtune.base.files import json_bytes, listing, remove_directory, write_directory
from dualtune.base.tensors import safetensors_pieces
from dualtune.base.untrusted import read_json, read_safetensors
from dualtune.data.order import MAX_STEPS
from dualtune.engine.backend import Engine, OptimizerState, check_state
from dualtune.model.adapter import Tensors, modules_of, scaled_ranks
from dualtune.model.formats.naming import rename_modules
from dualtune.model.optimizer import (
    OFFSET,
    OPTIMIZERS,
    SECOND_MOMENTS,
    OptimizerName,
    OptimizerSpec,
    RuleName,
    rule_of,
    slot_shapes,
    slots_of,
)
from dualtune.model.places import file_names
from dualtune.train.guards import GuardState
from dualtune.train.state.checkpoint_files import FILES, MANIFEST, MAX_STATE_BYTES, POLICY, slot_file

# 1 has no fingerprints and no guards, 2 has AdamW's slots, 3 those of another train.optimizer. 4 is written only where
# train.schedule or train.average have slots: a dualtune without these keys then reports that it is too old, instead of
# a damaged checkpoint.
SCHEMA_VERSION, OPTIMIZER_VERSION, ADAMW_VERSION = 4, 3, 2
MAX_MANIFEST_BYTES = 1 << 20
BYTES_PER_WEIGHT = 4  # float32, also for slots that are in 8 bits in memory
# The proof that a checkpoint belongs to this base model and these data; without these there is nothing to compare.
FINGERPRINTS = frozenset(
    {"base model's config", "base model's weights", "tokenizer", "chat template", "train documents", "eval documents"}
)
_NAME = re.compile(r"step-(\d{8,})")
_SLOT_FILE = re.compile(r"optimizer_[a-z0-9_]{1,40}\.safetensors", re.ASCII)


class NewerCheckpoint(FormatError):
    """A checkpoint that a newer dualtune wrote. Do not fall back to an older one."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A training state. `state` is the content of state.json."""

    path: Path
    step: int  # optimizer steps done
    adapter: Tensors
    optimizer: OptimizerState
    state: dict[str, Any]
    policy: Tensors = field(default_factory=lambda: {})  # of the step policy


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A checkpoint in a listing."""

    path: str
    step: int
    num_bytes: int
    problem: str | None  # what is wrong with it
    is_best: bool = False  # it has the best evaluation; where that is asked


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def bytes_per_weight(optimizer: OptimizerSpec) -> int:
    """Return the bytes of a checkpoint per weight of the adapter, at most: the weight and its optimizer state."""
    return BYTES_PER_WEIGHT * (1 + optimizer.entry.most_per_weight + (optimizer.average is not None))


def save(directory: Path, step: int, engine: Engine, state: Mapping[str, Any], policy: Tensors | None = None) -> Path:
    """Write the state after `step` steps. DiskError if that fails; NonFiniteError if the state is unusable."""
    adapter, optimizer = engine.adapter_state(), engine.optimizer_state()
    parts = (adapter, *optimizer.slots.values(), policy or {})
    for name, tensor in (item for tensors in parts for item in tensors.items()):
        if not np.isfinite(tensor).all():
            raise NonFiniteError(f"step {step}: {name} holds NaN or Inf. Nothing was saved. Lower train.learning_rate")
    files = {
        "adapter.safetensors": safetensors_pieces(adapter),
        **{slot_file(slot): safetensors_pieces(tensors) for slot, tensors in optimizer.slots.items()},
        "state.json": json_bytes({"step": step, "optimizer_step": optimizer.step, **state}),
    }
    if policy:
        files[POLICY] = safetensors_pieces(policy)
    files[MANIFEST] = json_bytes({"schema_version": _version_of(optimizer), "step": step, "files": listing(files)})
    path = path_of(directory, step)
    write_directory(path, files)
    return path


def _version_of(optimizer: OptimizerState) -> int:
    """Return the oldest schema version that has these slots."""
    slots = {*optimizer.slots}
    if slots == {*OPTIMIZERS["adamw"].slots}:
        return ADAMW_VERSION
    of_optimizers = [{*entry.slots} for name, entry in OPTIMIZERS.items() if name != "schedule_free"]
    return OPTIMIZER_VERSION if slots in of_optimizers else SCHEMA_VERSION


def prune(directory: Path, keep: int, protected: Collection[int]) -> None:
    """Remove all but the newest `keep` checkpoints (at least two) and the protected steps. Raises DiskError."""
    for path, step in _directories(directory)[max(keep, 2) :]:
        if step not in protected:
            faults.reach("prune")
            remove_directory(path)
            faults.reach("pruned")


def steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints in a directory, newest first, without verifying them."""
    return [step for _, step in _directories(directory)]


def total_bytes(directory: Path) -> int:
    """Return the disk space that the checkpoints of a directory take."""
    return sum(_num_bytes(path) for path, _ in _directories(directory))


def entries(directory: Path) -> list[CheckpointEntry]:
    """Return every checkpoint of a directory, verified, newest first."""
    return [
        CheckpointEntry(str(path), step, _num_bytes(path), problem_of(path)) for path, step in _directories(directory)
    ]


def newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, and the problem of each newer one.

    Only a damaged checkpoint is passed over for an older one; NewerCheckpoint if a newer dualtune wrote one of these.
    """
    passed_over: list[str] = []
    for path, _ in _directories(directory):
        try:
            return read(path), passed_over
        except NewerCheckpoint:
            raise
        except FormatError as problem:
            passed_over.append(str(problem))
    return None, passed_over


def holding(directory: Path, adapter: Tensors) -> Checkpoint:
    """Return the newest checkpoint that has these weights, in their names. FormatError if none has."""
    problems: list[str] = []
    for path, step in _directories(directory):
        try:
            saved = in_names_of(adapter, read(path))
        except FormatError as problem:
            problems.append(str(problem))
            continue
        if saved.adapter.keys() == adapter.keys() and all(
            np.array_equal(saved.adapter[name], x) for name, x in adapter.items()
        ):
            return saved
        problems.append(f"{path}: after step {step} the weights are others")
    raise FormatError("\n".join(problems[:5]) or f"{directory}: holds no checkpoint")


def set_aside(directory: Path, after: int) -> list[Path]:
    """Rename checkpoints of later steps, which are damaged or from an abandoned branch. None is removed."""
    moved: list[Path] = []
    for path, step in _directories(directory):
        if step > after:
            number = next(n for n in range(1, 10**6) if not (directory / f"{path.name}.old-{n}").exists())
            try:
                moved.append(path.rename(directory / f"{path.name}.old-{number}"))
            except OSError as error:
                raise DiskError(f"{path}: cannot be renamed: {error.strerror}") from error
    return moved


def read(path: Path) -> Checkpoint:
    """Return a verified checkpoint, or raise FormatError with its problem."""
    manifest, state = _verified(path)
    adapter = read_safetensors(path / "adapter.safetensors")
    slots = {slot: read_safetensors(path / slot_file(slot)) for slot in _slots_of(state)}
    policy = read_safetensors(path / POLICY) if POLICY in manifest["files"] else {}
    shapes, *of_slots = [{name: x.shape for name, x in tensors.items()} for tensors in (adapter, *slots.values())]
    # A start that is kept is half of the adapter, and has no slots; the engine knows whether there is one.
    possible = (shapes, scaled_ranks(shapes, 1, 2))
    expected = [slot_shapes(OPTIMIZERS[_rule(state)], own, averages=OFFSET in slots) for own in possible]
    if dict(zip(slots, of_slots, strict=True)) not in expected:
        raise FormatError(f"{path}: the adapter and the optimizer state do not have the same tensors")
    if not all(np.isfinite(x).all() for tensors in (adapter, *slots.values(), policy) for x in tensors.values()):
        raise FormatError(f"{path}: holds NaN or Inf, which is never saved: it was changed afterwards")
    for slot in SECOND_MOMENTS & slots.keys():  # the update takes their root
        if any((x < 0).any() for x in slots[slot].values()):
            raise FormatError(f"{path / slot_file(slot)}: holds a negative second moment: it was changed afterwards")
    return Checkpoint(path, state["step"], adapter, OptimizerState(state["optimizer_step"], slots), state, policy)


def optimizer_of(state: Mapping[str, Any]) -> OptimizerName:
    """Return the optimizer that wrote the checkpoint's state: AdamW in old checkpoints without this entry."""
    return _train_section(state).get("optimizer", "adamw")


def _slots_of(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the slots that the checkpoint's config asks for. Old checkpoints have none of train.average."""
    return slots_of(_rule(state), averages=_train_section(state).get("average", "none") != "none")


def _rule(state: Mapping[str, Any]) -> RuleName:
    return rule_of(optimizer_of(state), _train_section(state).get("schedule", "cosine"))


def _train_section(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return state["config"].get("train") or {}


def files_of(saved: Checkpoint) -> list[str]:
    """Return the names of its files."""
    return sorted([MANIFEST, *FILES, *map(slot_file, saved.optimizer.slots), *([POLICY] if saved.policy else [])])


def _check_step(path: Path, manifest: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise FormatError unless name, manifest and state have the same step: a copy may have another step's name."""
    named = _NAME.fullmatch(path.name)  # a copy in another directory may have any name
    steps = {"its name": int(named[1]) if named else state["step"], MANIFEST: manifest.get("step")}
    for source, step in steps.items():
        if step != state["step"]:
            shown = fields.shown(fields.text_of(step))
            raise FormatError(f"{path}: it holds the state after step {state['step']}, but {source} says {shown}")


def _check_complete(path: Path, state: Mapping[str, Any]) -> None:
    """Raise FormatError if something is missing that every checkpoint since schema version 2 has."""
    names = {*state, *(f"fingerprints: {name}" for name in fields.subtable(state, "fingerprints", path))}
    needed = {"place", "schedule", "guards", "fingerprints", *(f"fingerprints: {name}" for name in FINGERPRINTS)}
    if missing := sorted(needed - names):
        raise FormatError(f"{path / 'state.json'}: {missing[0]}: missing, so the run cannot be compared with it")


def _read_state(path: Path) -> dict[str, Any]:
    """Return state.json, after checking the types of the values that others use. It may come from another machine."""
    file = path / "state.json"
    state = read_json(file, max_bytes=MAX_STATE_BYTES, is_own=True)
    for key in ("step", "optimizer_step"):
        if type(value := fields.required(state, key, file)) is not int or not 0 <= value <= MAX_STEPS:
            raise fields.wrong(file, key, value, "a number of steps")
    fields.required(state, "config", file)
    for section in fields.subtable(state, "config", file):
        fields.subtable(state["config"], section, f"{file}: config")
    train = _train_section(state)
    for key in ("optimizer", "schedule", "average"):
        if type(name := train.get(key, "")) is not str:
            raise fields.wrong(file, f"config: train.{key}", name, "a name")
    for key, value in fields.subtable(state, "fingerprints", file).items():
        if not isinstance(value, str):
            raise fields.wrong(f"{file}: fingerprints", key, value, "a string")
    for key in ("place", "schedule", "guards"):
        fields.subtable(state, key, file)
    if policy := fields.subtable(state, "policy", file):
        fields.required(policy, "name", f"{file}: policy")
        fields.subtable(policy, "values", f"{file}: policy")
    for key, value in fields.subtable(state, "updates", file).items():
        if not (_is_number(value) or value is None):
            raise fields.wrong(f"{file}: updates", key, value, "a number")
    tokens = fields.subtable(state, "memory", file).get("micro_batch_tokens", 1)
    if type(tokens) is not int or tokens < 1:
        raise fields.wrong(file, "memory: micro_batch_tokens", tokens, "a number of tokens")
    _check_guards(state.get("guards") or {}, f"{file}: guards")
    return state


def _check_guards(guards: Mapping[str, Any], where: str) -> None:
    defaults = asdict(GuardState())
    for key in guards:
        value: Any = guards[key]
        if key == "losses":
            is_valid = isinstance(guards[key], list) and all(map(_is_number, guards[key]))
        elif key == "in_spike":
            is_valid = isinstance(value, bool)
        else:  # a step, a count or a loss; null if there is none yet
            is_valid = key in defaults and (_is_number(value) or (value is None and defaults[key] is None))
        if not is_valid:
            raise fields.wrong(where, key, value, "a value of the state of the guards")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def problem_of(path: Path) -> str | None:
    """Return the problem of a checkpoint, found without reading its tensors; None if there is none."""
    try:
        _verified(path)
    except FormatError as error:
        return str(error).removeprefix(f"{path}: ")
    return None


def _verified(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest and state.json, after checking the size and hash of every file and that all have one step."""
    try:
        manifest = _verified_manifest(path)
    except FormatError as problem:
        raise type(problem)(f"{path}: {problem}") from None
    state = _read_state(path)
    _check_step(path, manifest, state)
    if manifest["schema_version"] > 1:
        _check_complete(path, state)

    # The config in the state says which slots there are. A manifest that lists others is not that of this state.
    name = optimizer_of(state)
    if name not in OPTIMIZERS:
        raise NewerCheckpoint(
            f"{path}: was written by a newer dualtune: its optimizer is {fields.shown(name)!r}, this one has "
            f"{', '.join(OPTIMIZERS)}. Upgrade dualtune"
        )
    try:
        _check_listed({*manifest["files"]}, FILES | {slot_file(slot) for slot in _slots_of(state)})
    except FormatError as problem:
        raise FormatError(f"{path}: {problem}, and its optimizer is {name}") from None
    return manifest, state


def _verified_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest, after verifying the files that it lists. FormatError names the problem."""
    if path.is_symlink():
        raise FormatError("is a symbolic link, but a checkpoint is a directory. Copy the directory that it points to")
    file = path / MANIFEST
    try:
        file.lstat()
    except OSError as error:
        is_gone = isinstance(error, FileNotFoundError)
        raise FormatError(f"{MANIFEST} is missing" if is_gone else f"{MANIFEST}: {error.strerror}") from None
    try:
        manifest = read_json(file, max_bytes=MAX_MANIFEST_BYTES, is_own=True)
        version = fields.rank(manifest, "schema_version", MANIFEST)
        fields.required(manifest, "files", MANIFEST)
        listed = fields.subtable(manifest, "files", MANIFEST)
        files = {name: fields.subtable(listed, name, MANIFEST) for name in listed}
    except FormatError as error:
        raise FormatError(f"{MANIFEST} is not a manifest ({str(error).removeprefix(f'{file}: ')})") from None
    # The version first: a newer dualtune may list files that this one does not know.
    if version > SCHEMA_VERSION:
        raise NewerCheckpoint(
            f"was written by a newer dualtune: it has schema version {version}, this one reads up to "
            f"{SCHEMA_VERSION}. Upgrade dualtune"
        )
    _check_listed({*files}, FILES | {name for name in files if _SLOT_FILE.fullmatch(name)})
    for name, entry in files.items():
        if problem := _problem_of_file(path / name, entry):
            raise FormatError(problem)
    return manifest


def _check_listed(listed: Collection[str], needed: Collection[str]) -> None:
    """Raise FormatError unless both are the same, but for POLICY. A foreign manifest could name any file."""
    if missing := {*needed} - {*listed}:
        raise FormatError(f"{MANIFEST} does not list {', '.join(sorted(missing))}")
    if foreign := {*listed} - {*needed} - {POLICY}:
        names = ", ".join(repr(fields.shown(name)) for name in sorted(foreign)[:8])
        raise FormatError(f"{MANIFEST} lists {names}, which does not belong to a checkpoint")


def _problem_of_file(file: Path, entry: Mapping[str, Any]) -> str | None:
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):  # a link may lead to a foreign file; a pipe never ends
            return f"{file.name} is not a regular file"
        if status.st_size != entry.get("bytes"):
            listed = fields.shown(fields.text_of(entry.get("bytes")))
            return f"{file.name} has {status.st_size} bytes, but the manifest says {listed}"
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return None if digest == entry.get("sha256") else f"{file.name} is damaged: its sha256 differs from the manifest's"


def _directories(directory: Path) -> list[tuple[Path, int]]:
    """Return (path, step) of everything that is named like a checkpoint, newest first."""
    matches = [(path, match) for path in directory.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(((path, int(match[1])) for path, match in matches), key=lambda item: -item[1])


def _num_bytes(path: Path) -> int:
    """Return the size of its files; 0 if it is not a directory or cannot be read."""
    with contextlib.suppress(OSError):
        return sum(file.lstat().st_size for file in path.iterdir())
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# An engine in the state of a checkpoint, whatever the names in it.


def restore(engine: Engine, saved: Checkpoint) -> None:
    """Restore an engine from a checkpoint. FormatError, with nothing changed, if it belongs to another adapter."""
    saved = in_names_of(engine.adapter_shapes, saved)
    try:
        check_state(engine.adapter_shapes, saved.adapter, f"{saved.path}: adapter.safetensors")
    except ValueError as error:
        raise FormatError(f"{error}. It is from another run, or was changed afterwards") from None
    engine.load_adapter_state(saved.adapter)
    engine.load_optimizer_state(saved.optimizer)


def in_names_of(tensors: Collection[str], saved: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names of an engine's tensors: older ones have others inside a wrapper."""
    if saved.adapter.keys() == {*tensors}:
        return saved
    names = file_names(modules_of(saved.adapter), modules_of(tensors))
    slots = {slot: rename_modules(tensors, names) for slot, tensors in saved.optimizer.slots.items()}
    return replace(saved, adapter=rename_modules(saved.adapter, names), optimizer=replace(saved.optimizer, slots=slots))
