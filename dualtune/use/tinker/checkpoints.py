"""The run directories of a training host: one for each run of a client, and in it what was saved under which name.

tinker.json             the base and the settings of the adapter
weights/NAME            a state to go on from: adapter/, in PEFT's format, and checkpoints/, a checkpoint of dualtune
sampler_weights/NAME    weights to sample from: adapter/
adapter/                what was saved last, for every command that takes a run
config.yaml, metrics.jsonl, lock   as in any run directory

Names come from clients: they are single names of a few characters, never paths. All functions here only use files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from dualtune.base import fields
from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.files import fsync, hidden_sibling, json_bytes, new_directory, remove_directory, write_directory
from dualtune.base.untrusted import read_json
from dualtune.engine.backend import Engine
from dualtune.model.adapter import modules_of
from dualtune.model.formats.directory import Adapter, write_adapter
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.run_dir import ADAPTER, CHECKPOINTS, CONFIG, SERVED
from dualtune.use.tinker.adapters import parts_of, section_of, spec_in
from dualtune.use.tinker.messages import CheckpointInfo, CheckpointKind, ServedRun

MAX_RECORD_BYTES = 1 << 16
SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}", re.ASCII)
# What the record says of a run, whose name is that of its directory.
_OF_A_RUN: Mapping[str, type] = {
    "base": str, "rank": int, "seed": int, "train_attn": bool, "train_mlp": bool, "train_unembed": bool,
    "created": float,
}  # fmt: skip
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)


def check_name(what: str, name: str) -> str:
    """Return the name. ConfigError if it could be anything but a name in a directory."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{what}: got {name[:100]!r}, allowed: up to 128 letters, digits, _ . : and -, the first no . : or -"
        )
    return name


# ----------------------------------------------------------------------------------------------------------------------
# Runs.


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory that exists."""

    path: Path

    @classmethod
    def create(cls, runs_dir: Path, info: ServedRun, config: Mapping[str, Any]) -> RunDirectory:
        """Create the directory of a new run. ConfigError if there is one of this name."""
        path = runs_dir / check_name("run", info.name)
        if os.path.lexists(path):
            raise ConfigError(f"run: there is already a run '{info.name}' in {runs_dir}. Choose another name")
        record = {"schema_version": 1, **{name: getattr(info, name) for name in _OF_A_RUN}}
        record |= {} if info.adapter is None else {"adapter": dict(info.adapter)}
        # JSON is YAML.
        write_directory(path, {SERVED: json_bytes(record), CONFIG: json_bytes(config)})
        return cls(path)

    def directory(self, kind: CheckpointKind, name: str) -> Path:
        return self.path / kind / check_name("checkpoint", name)

    def save(
        self, kind: CheckpointKind, name: str, adapter: Adapter, record: Mapping[str, Any], *, overwrite: bool = False,
        state: tuple[Engine, int, Mapping[str, Any]] | None = None,
    ) -> CheckpointInfo:  # fmt: skip
        """Save an adapter under a name, whole or not at all; with a `state` (engine, step, state.json) also that.

        ConfigError if the name is taken, unless it may be overwritten.
        """
        target = self.directory(kind, name)
        if os.path.lexists(target) and not overwrite:
            raise ConfigError(f"checkpoint: there is already a '{name}' of this run. Choose another name")
        with replacing(target) as temporary:
            write_adapter(temporary / ADAPTER, adapter, layout="peft", metadata=record)
            if state is not None:
                engine, step, entries = state
                checkpoint.save(temporary / CHECKPOINTS, step, engine, entries)
        self._show_last(target / ADAPTER)
        return info_of(self.path, kind, name)

    def _show_last(self, saved: Path) -> None:
        """Make the run's adapter the one that was saved last. The files are the same, so they take no room."""
        with replacing(self.path / ADAPTER) as temporary:
            for file in saved.iterdir():
                try:
                    os.link(file, temporary / file.name)
                except OSError:  # a file system without links
                    shutil.copy2(file, temporary / file.name)


@contextlib.contextmanager
def replacing(target: Path) -> Generator[Path]:
    """Yield a directory to write to, which takes the place of `target` when it is complete; until then that stays."""
    complete, old = hidden_sibling(target), hidden_sibling(target)
    with new_directory(complete) as temporary:
        yield temporary
    if os.path.lexists(target):
        target.rename(old)
    complete.rename(target)
    fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_run(path: Path) -> ServedRun:
    """Return what a run directory says of its run. FormatError if it is not of a training host, or was changed."""
    file = path / SERVED
    record = read_json(file, max_bytes=MAX_RECORD_BYTES, is_own=True)
    values: dict[str, Any] = {}
    for name, kind in _OF_A_RUN.items():
        values[name] = fields.required(record, name, file)
        if type(values[name]) is not kind:
            raise fields.wrong(file, name, values[name], f"of type {kind.__name__}")
    return ServedRun(path.name, **values, adapter=fields.subtable(record, "adapter", file) or None)


def list_runs(runs_dir: Path) -> list[ServedRun]:
    """Return the runs of a directory, the newest first."""
    runs: list[ServedRun] = []
    for path in runs_dir.iterdir() if runs_dir.is_dir() else ():
        with contextlib.suppress(FormatError):
            runs.append(read_run(path))
    return sorted(runs, key=lambda info: -info.created)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints.


def parse_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Return (run, kind, name) of a path. ConfigError if it is none."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
        raise ConfigError(
            f"path: got {path[:200]!r}, allowed: tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
        )
    run, kind, name = check_name("run", parts[0]), KINDS[KINDS.index(parts[1])], check_name("checkpoint", parts[2])
    return run, kind, name


def find_checkpoint(runs_dir: Path, path: str) -> CheckpointInfo:
    """Return the checkpoint of a path. ConfigError if there is none."""
    run, kind, name = parse_path(path)
    if is_trained(runs_dir / run):
        raise ConfigError(_of_train(runs_dir / run, path))
    if not (runs_dir / run).is_dir():
        runs = [info.name for info in list_runs(runs_dir)]
        others = f"the newest: {', '.join(runs[:3])}" if runs else "there is none yet"
        raise ConfigError(f"path: got {path}, but there is no run '{run}'; {others}")
    if not (runs_dir / run / kind / name / ADAPTER).is_dir():
        names = [info.path for info in list_checkpoints(runs_dir, run)]
        others = f"its newest: {', '.join(names[:3])}" if names else f"the run '{run}' has saved none yet"
        raise ConfigError(f"path: there is no {path}; {others}")
    return info_of(runs_dir / run, kind, name)


def info_of(run_dir: Path, kind: CheckpointKind, name: str) -> CheckpointInfo:
    path = run_dir / kind / name
    size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    return CheckpointInfo(run_dir.name, kind, name, path.stat().st_mtime, size, path / ADAPTER)


def list_checkpoints(runs_dir: Path, run: str | None = None) -> list[CheckpointInfo]:
    """Return the checkpoints of a run, or of all, the newest first."""
    names = [check_name("run", run)] if run is not None else [info.name for info in list_runs(runs_dir)]
    checkpoints = [info for name in names for kind in KINDS for info in _of_kind(runs_dir / name, kind)]
    return sorted(checkpoints, key=lambda info: -info.created)


def _of_kind(run_dir: Path, kind: CheckpointKind) -> Iterator[CheckpointInfo]:
    for path in (run_dir / kind).iterdir() if (run_dir / kind).is_dir() else ():
        if NAME.fullmatch(path.name) and not path.is_symlink():
            with contextlib.suppress(OSError):  # it is being deleted
                yield info_of(run_dir, kind, path.name)


def delete_checkpoint(runs_dir: Path, path: str) -> None:
    """Delete a checkpoint. What the run shows as its last adapter stays."""
    remove_directory(find_checkpoint(runs_dir, path).directory.parent)


def read_state(runs_dir: Path, path: str) -> tuple[ServedRun, Checkpoint]:
    """Return the state that was saved under a path, verified, and its run. ConfigError if the path holds no state.

    That of a run of `dualtune train` is one of its checkpoints: tinker://RUN/weights/step-00000100.
    """
    run, _, _ = parse_path(path)
    if is_trained(runs_dir / run):
        return _read_trained(runs_dir / run, path)
    info = find_checkpoint(runs_dir, path)
    if info.kind != "weights":
        raise ConfigError(
            f"path: {path} has no state to train on, only weights to sample from. Give a path of save_state"
        )
    saved, problems = checkpoint.newest(info.directory.parent / CHECKPOINTS)
    if saved is None:
        raise FormatError(f"{path}: {problems[0] if problems else 'holds no checkpoint'}")
    return read_run(runs_dir / info.run), saved


def run_of(runs_dir: Path, path: str) -> ServedRun:
    """Return the run of a checkpoint. ConfigError if there is no such checkpoint."""
    run, _, _ = parse_path(path)
    if is_trained(runs_dir / run):
        return read_state(runs_dir, path)[0]
    return read_run(runs_dir / find_checkpoint(runs_dir, path).run)


def is_trained(run_dir: Path) -> bool:
    """Return whether a directory is that of a run of `dualtune train`."""
    return (run_dir / CHECKPOINTS).is_dir() and not os.path.lexists(run_dir / SERVED)


def _of_train(run_dir: Path, path: str) -> str:
    steps = checkpoint.steps(run_dir / CHECKPOINTS)
    states = [f"{SCHEME}{run_dir.name}/weights/{checkpoint.path_of(run_dir, step).name}" for step in steps[:3]]
    return (
        f"path: got {path}, of a run of `dualtune train`, whose states can be loaded and nothing else: "
        f"{', '.join(states) or 'it has none'}. To sample, save the weights of a training client from one"
    )


def _read_trained(run_dir: Path, path: str) -> tuple[ServedRun, Checkpoint]:
    _, kind, name = parse_path(path)
    directory = run_dir / CHECKPOINTS / name
    if kind != "weights" or not directory.is_dir():
        raise ConfigError(_of_train(run_dir, path))
    saved = checkpoint.read(directory)
    config, file = saved.state["config"], saved.path / "state.json"
    model, run = (fields.subtable(config, section, file) for section in ("model", "run"))
    spec = spec_in(fields.subtable(config, "adapter", file), str(saved.path))
    if type(seed := fields.required(run, "seed", file)) is not int:
        raise fields.wrong(file, "config: run.seed", seed, "a number")
    info = ServedRun(
        run_dir.name, str(fields.required(model, "name", file)), spec.rank, seed, *parts_of(modules_of(saved.adapter)),
        saved.path.stat().st_mtime, saved.step, section_of(spec),
    )  # fmt: skip
    return info, saved
