"""When and what a run saves. A disk that refuses does not end the run: it goes on with the checkpoints that it has."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

from dualtune.backend import Engine
from dualtune.config import Config
from dualtune.errors import DiskError, FormatError
from dualtune.hooks import Event
from dualtune.show import in_bytes
from dualtune.train import checkpoint
from dualtune.train.checkpoint import Checkpoint
from dualtune.train.guards import Guards
from dualtune.train.metrics import Metrics
from dualtune.train.prepare import Prepared, place_of
from dualtune.train.run_dir import CHECKPOINT_NOW, RunDir
from dualtune.train.schedule import is_due, learning_rate
from dualtune.train.together import shared

ADAPTER_BYTES_PER_WEIGHT = 8  # float32 in two layouts


class Saver:
    """Saves the state of an engine and of the guards, and keeps the newest checkpoints and the best."""

    def __init__(self, place: RunDir, prepared: Prepared, engine: Engine, guards: Guards, log: Metrics) -> None:
        self._place = place
        self._config = prepared.config
        self._order = prepared.order
        self._fixed = {"config": prepared.config.model_dump(mode="json"), "fingerprints": prepared.fingerprints}
        self._engine = engine
        self._guards = guards
        self._log = log
        self._team = prepared.team
        self._saved_step = prepared.saved.step if prepared.saved else None
        self.newest = prepared.saved.path if prepared.saved else None
        self.failure: DiskError | None = None  # of the last attempt

    def save(self, step: int) -> None:
        """Write a checkpoint, unless this step has one. Of several processes the first does it for all."""
        if step == self._saved_step or not self._team.is_first:
            return
        state = {"place": place_of(self._order, step), "schedule": self._schedule(step)} | self._fixed
        state["guards"] = self._guards.saved_state()
        self._log.sync()
        try:
            self.newest = checkpoint.save(self._place.checkpoints, step, self._engine, state)
        except DiskError as error:
            self.failure = error
            kept = f"{self.newest} remains" if self.newest else "there is none yet"
            self._log.event(Event(step, "save_failed", f"no checkpoint after step {step}: {error} Older ones: {kept}"))
            return
        self._saved_step, self.failure = step, None
        try:
            checkpoint.prune(self._place.checkpoints, self._config.run.keep, self._protected())
        except DiskError as error:
            self._log.event(Event(step, "prune_failed", str(error)))

    def asked(self) -> bool:
        """Whether somebody has made the file checkpoint-now. It is removed."""
        try:
            (self._place.path / CHECKPOINT_NOW).unlink()
        except OSError:  # not there, or not ours to remove: once for every step would be too often
            return False
        return True

    def before_spike(self, step: int) -> Checkpoint | None:
        """The checkpoint to return to: the newest scheduled one, because others depend on who stopped the run.

        The second time in a row an older one, and so on: the first may have been made when the damage was done already.
        """
        before = (s for s in checkpoint.steps(self._place.checkpoints) if s < step and self._is_scheduled(s))
        found = next(filter(None, map(self._read, filter(self._guards.may_return_to, before))), None)
        return shared(self._team, found)

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best evaluation, if there was one and it verifies."""
        step = self._guards.state.best_step
        return shared(self._team, None if step is None else self._read(step))

    def _read(self, step: int) -> Checkpoint | None:
        with contextlib.suppress(FormatError):
            return checkpoint.read(checkpoint.path_of(self._place.checkpoints, step))
        return None

    def _protected(self) -> set[int]:
        """Steps whose checkpoints are kept however old they are: the best, and two to roll back to."""
        best = self._guards.state.best_step
        protected = set[int]() if best is None else {best}
        if self._config.guards.on_spike == "rollback":
            protected |= set([s for s in checkpoint.steps(self._place.checkpoints) if self._is_scheduled(s)][:2])
        return protected

    def _is_scheduled(self, step: int) -> bool:
        return is_due(step, self._config.run.save_every)

    def _schedule(self, step: int) -> dict[str, Any]:
        num_steps = self._order.num_steps
        return {"num_steps": num_steps, "next_learning_rate": learning_rate(self._config, step, num_steps)}


def check_space(place: RunDir, config: Config, num_weights: int) -> None:
    """DiskError if the checkpoints and the adapter of an adapter with so many weights will not fit on the disk."""
    each = num_weights * checkpoint.BYTES_PER_WEIGHT
    kept = max(config.run.keep, 2) + 1 + bool(config.data.eval)  # one is written before one is removed; the best one
    needed = max(each, kept * each - checkpoint.total_bytes(place.checkpoints)) + num_weights * ADAPTER_BYTES_PER_WEIGHT
    free = shutil.disk_usage(place.path).free
    if free < needed:
        raise DiskError(
            f"run.dir: {place.path} needs {in_bytes(needed)} more, for {kept} checkpoints of {in_bytes(each)} and "
            f"the adapter, and the disk has {in_bytes(free)} free. Free some, lower run.keep, or choose another run.dir"
        )
