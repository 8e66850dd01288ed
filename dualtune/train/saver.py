"""When and what a run saves. If the disk cannot be written, training continues and keeps the older checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtune.base.errors import DiskError, FormatError
from dualtune.base.files import OpenDirectory, free_name, set_aside, write_file
from dualtune.base.text import in_bytes
from dualtune.config import Config, to_yaml
from dualtune.engine.backend import state_size
from dualtune.train import memory
from dualtune.train.hooks import SAVE, Event
from dualtune.train.objective import is_due, learning_rate, optimizer_spec, update_settings
from dualtune.train.policies import entry_of
from dualtune.train.prepare import position_of
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.run_dir import CHECKPOINT_NOW, CHECKPOINTS, CONFIG, METRICS, RunDir, shared

if TYPE_CHECKING:
    from dualtune.train.run import Job

ADAPTER_BYTES_PER_WEIGHT, MODEL_BYTES_PER_WEIGHT = 8, 4  # float32 in two layouts; float32


class Saver:
    """Saves the state of the engine, the guards and the step policy; keeps the newest checkpoints and the best one."""

    def __init__(self, job: Job) -> None:
        """Take the parts of a job that exist before its saver."""
        prepared, engine = job.prepared, job.engine
        self._run_dir, self._watchers, self._log = job.run_dir, job.watchers, job.log
        self._guards, self._recovery, self._engine = job.guards, job.recovery, engine
        self._prepared, self._config, self._team = prepared, prepared.config, prepared.team
        self._order, self._policy = prepared.data.order, job.policy
        self._fixed: dict[str, Any] = {
            "config": prepared.config.model_dump(mode="json"),
            "fingerprints": prepared.fingerprints,
            "updates": update_settings(prepared.config, prepared.data.order.num_steps),
        }
        if engine.description.threads is not None:
            self._fixed["threads"] = engine.description.threads
        saved = prepared.checkpoint
        self._saved_step = saved.step if saved else None
        self.newest = saved.path if saved else None
        self.failure: DiskError | None = None  # of the last attempt
        self._opened: OpenDirectory | None = None  # the directory of the checkpoints
        self._needed = sum(_sizes(prepared.config, state_size(engine)))
        self._is_short = False
        self._open_checkpoints()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def save(self, step: int) -> None:
        """Write a checkpoint, unless this step has one. With several processes, only the first one writes."""
        self.check_files(step)
        if step == self._saved_step or not self._team.is_first:
            return
        self._watchers.enter(step, SAVE)
        self._log.sync()
        try:
            self.newest = self._write(self._run_dir.checkpoints, step)
            self._open_checkpoints()
        except DiskError as error:
            self.failure = error
            older = f"The newest one is {self.newest}" if self.newest else "There is no older one"
            self._log.event(Event(step, "save_failed", f"no checkpoint after step {step}: {error} {older}"))
            return
        self._saved_step, self.failure = step, None
        try:
            checkpoint.prune(self._run_dir.checkpoints, self._config.run.keep, self._protected())
        except DiskError as error:
            self._log.event(Event(step, "prune_failed", str(error)))

    def check_files(self, step: int) -> None:
        """Find and restore files that were deleted or replaced since the last call.

        If the run directory itself was replaced or removed, another run may use it, or the user wanted it gone. Then
        nothing is written there: the state is saved in a new directory, and DiskError names it.
        """
        if not self._team.is_first:
            return
        if fault := self._run_dir.fault():
            raise self._rescue(step, fault)
        try:
            notes = [
                self._log.restore_file(),
                *map(self._restore_record, self._run_dir.records),
                self._check_checkpoints(),
            ]
        except DiskError as error:
            notes = [str(error)]
        for note in filter(None, notes):
            self._log.event(Event(step, "replaced", note))

    def check_space(self, step: int) -> None:
        """Say once, before a save fails, that the disk has no room for the next checkpoint and the result."""
        if not self._team.is_first:
            return
        try:
            free = shutil.disk_usage(self._run_dir.path).free
        except OSError:  # `check_files` says what has happened to the directory
            return
        was_short, self._is_short = self._is_short, free < self._needed
        if self._is_short and not was_short:
            text = (
                f"the disk of {self._run_dir.path} has {in_bytes(free)} free, and the next checkpoint and the result "
            )
            text += f"need {in_bytes(self._needed)}. Free some space before the next save"
            self._log.event(Event(step, "disk_low", text, {"free_bytes": free, "needed_bytes": self._needed}))

    def was_requested(self) -> bool:
        """Return whether the user has created the file checkpoint-now, and remove it."""
        try:
            (self._run_dir.path / CHECKPOINT_NOW).unlink()
        except OSError:  # absent, or cannot be removed: then every step would save
            return False
        return True

    def before_spike(self, step: int) -> Checkpoint | None:
        """Return the checkpoint to roll back to: the newest scheduled one.

        Unscheduled checkpoints depend on when the run was stopped. For a second spike in a row an older checkpoint is
        taken, and so on, because the first may already contain the damage.
        """
        before = (s for s in checkpoint.steps(self._run_dir.checkpoints) if s < step and self._is_scheduled(s))
        saved = next(filter(None, map(self._read, filter(self._guards.may_return_to, before))), None)
        return shared(self._team, saved)

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best evaluation, if there is one and it verifies."""
        step = self._guards.state.best_step
        return shared(self._team, None if step is None else self._read(step))

    def _write(self, checkpoints: Path, step: int) -> Path:
        """Write a checkpoint of the complete state of the run."""
        num_steps = self._order.num_steps
        schedule = {"num_steps": num_steps, "next_learning_rate": learning_rate(self._config, step, num_steps)}
        state = {"place": position_of(self._order, step), "schedule": schedule} | self._fixed
        policy = self._policy.state()
        state |= {"guards": asdict(self._guards.state)} | entry_of(self._policy, policy)
        state |= memory.entry_of(self._recovery, self._prepared)
        return checkpoint.save(checkpoints, step, self._engine, state, policy.tensors)

    def _rescue(self, step: int, fault: str) -> DiskError:
        """Save everything in a new run directory next to the old one. Return the error that ends the run."""
        old = self._run_dir.path
        new = free_name(old.with_name(f"{old.name}-rescued"))
        moved = self._config.model_copy(update={"run": self._config.run.model_copy(update={"dir": str(new)})})
        try:
            new.mkdir(parents=True)
            for name, text in self._run_dir.records.items():
                write_file(new / name, to_yaml(moved) if name == CONFIG else text)
            self._log.copy_to(new / METRICS)
            self.newest = self._write(new / CHECKPOINTS, step)
        except (OSError, DiskError) as error:
            return DiskError(f"run.dir: {fault} during training, and nothing could be saved in {new}: {error}")
        return DiskError(
            f"run.dir: {fault} during training, so nothing more is written there. The state after step {step} "
            f"is saved in {new}. To resume: --set run.dir={new}"
        )

    def _restore_record(self, name: str) -> str | None:
        """Restore a file that records how the run is trained. Contents are compared, because editors replace files."""
        path, text = self._run_dir.path / name, self._run_dir.records[name]
        try:
            is_same = (
                path.is_file()
                and path.stat().st_size == len(text.encode())
                and path.read_text(encoding="utf-8") == text
            )
        except (OSError, ValueError):
            is_same = False
        if is_same:
            return None
        fault = f"{path} was {'changed' if os.path.lexists(path) else 'deleted'}, which has no effect on this run"
        try:
            aside = set_aside(path)
        except OSError as error:
            raise DiskError(f"{fault}, and cannot be renamed: {error.strerror}") from error
        write_file(path, text)
        return f"{fault}; it was restored{aside}"

    def _check_checkpoints(self) -> str | None:
        """Check that the checkpoints are still where they were saved; else set aside whatever is there."""
        fault = self._opened.fault() if self._opened else None
        if self._opened is None or fault is None:
            return None
        self._opened.close()
        self._opened = self._saved_step = self.newest = None
        try:
            aside = set_aside(self._run_dir.checkpoints)
        except OSError as error:
            raise DiskError(f"{fault}, and cannot be renamed: {error.strerror}") from error
        return f"{fault}: its checkpoints are lost; the next one is saved in a new directory{aside}"

    def _open_checkpoints(self) -> None:
        if self._opened is None and self._team.is_first and self._run_dir.checkpoints.is_dir():
            self._opened = OpenDirectory(self._run_dir.checkpoints)

    def _read(self, step: int) -> Checkpoint | None:
        with contextlib.suppress(FormatError):
            return checkpoint.read(checkpoint.path_of(self._run_dir.checkpoints, step))
        return None

    def _protected(self) -> set[int]:
        """Return the steps with checkpoints that are never pruned: the best one, and two to roll back to."""
        best = self._guards.state.best_step
        protected = set[int]() if best is None else {best}
        if self._config.guards.on_spike == "rollback":
            protected |= set([s for s in checkpoint.steps(self._run_dir.checkpoints) if self._is_scheduled(s)][:2])
        return protected

    def _is_scheduled(self, step: int) -> bool:
        return is_due(step, self._config.run.save_every)


def _sizes(config: Config, num_weights: int) -> tuple[int, int]:
    """Return the bytes of a checkpoint and of the result of a run that trains this many weights."""
    of_checkpoint = checkpoint.bytes_per_weight(optimizer_spec(config, num_steps=1))  # its slots are the same
    of_result = MODEL_BYTES_PER_WEIGHT if config.adapter.trains_model else ADAPTER_BYTES_PER_WEIGHT
    return num_weights * of_checkpoint, num_weights * of_result


def check_space(
    run_dir: RunDir, config: Config, num_weights: int, num_steps: int | None = None, first_step: int = 0
) -> None:
    """Raise DiskError if the checkpoints and the adapter, with this many weights, do not fit on the disk.

    `num_steps`: of the run, of which `first_step` are done; None: not known, so as many as are ever kept.
    """
    one, of_result = _sizes(config, num_weights)
    most = max(config.run.keep, 2) + 1 + bool(config.data.eval)  # written before another is removed; and the best
    saves = most if num_steps is None else _num_saves(config, first_step, num_steps, most)
    added = max(one, min(saves * one, most * one - checkpoint.total_bytes(run_dir.checkpoints)))
    needed = added + of_result
    free = shutil.disk_usage(run_dir.path).free
    if free < needed:
        count = "a checkpoint" if saves == 1 else f"{saves} checkpoints"
        raise DiskError(
            f"run.dir: {run_dir.path} needs {in_bytes(needed)} more, for {count} of {in_bytes(one)} and "
            f"the result, but the disk has {in_bytes(free)} free. Free some space, lower run.keep, or "
            "choose another run.dir"
        )


def _num_saves(config: Config, first_step: int, num_steps: int, most: int) -> int:
    """Return how many checkpoints the steps after `first_step` save, counted up to `most`.

    Those that are due, that of the last step, and one for each evaluation, as it may be the best.
    """
    steps = {num_steps} | ({0} if config.guards.on_spike == "rollback" and first_step == 0 else set[int]())
    for every in (config.run.save_every, config.run.eval_every if config.data.eval else None):
        if every is not None:
            steps.update(range(first_step - first_step % every + every, num_steps + 1, every)[:most])
    return min(len(steps), most)
