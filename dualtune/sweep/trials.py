"""The runs of a sweep: each a config with a directory of its own, checked before the first one is trained."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dualtune.backend import Backend
from dualtune.config import Config
from dualtune.data.documents import Show
from dualtune.errors import ConfigError, DualtuneError
from dualtune.io.folder import check_own
from dualtune.sweep.values import Values
from dualtune.train.prepare import prepare
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.resume import as_recorded, effective_changes, table
from dualtune.train.state.run_dir import check_usable, find_saved, path_of


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """A run of a sweep."""

    name: str
    values: Values
    config: Config

    @property
    def path(self) -> Path:
        """The run directory."""
        return path_of(self.config)


@dataclass(frozen=True, slots=True)
class CheckedTrial:
    """What the checks of a trial have found."""

    trial: SweepTrial
    num_steps: int
    has_eval: bool
    eval_documents: str  # their fingerprint
    memory: list[str]  # the lines of its estimate


def check(trial: SweepTrial, backend: Backend, show: Show) -> CheckedTrial:
    """Check a trial as `dualtune train --dry-run` does. A DualtuneError names the trial."""
    try:
        check_own(trial.path, stat.S_ISDIR)  # a link in the sweep's directory may lead anywhere
        check_usable(trial.path, "auto")
        saved, _ = find_saved(trial.path, "auto")
        if saved is not None:
            _check_same(saved, trial.config)
        prepared = prepare(trial.config, backend, saved, show)
    except DualtuneError as error:
        raise type(error)(f"{trial.name}: {error}") from error
    return CheckedTrial(
        trial, prepared.data.order.num_steps, len(prepared.data.eval) > 0, prepared.fingerprints["eval documents"],
        prepared.memory.lines(),
    )  # fmt: skip


def _check_same(saved: Checkpoint, config: Config) -> None:
    """Raise ConfigError if a run began with other values: it would be trained with both, and not be comparable."""
    if changes := effective_changes(saved, as_recorded(saved, config)):
        raise ConfigError(
            f"{saved.path}: was trained with other values, so it is no run of this sweep.\n{table(changes)}\n"
            "Give these values again, or another directory: --dir DIR"
        )


def have_same_eval(checked: Sequence[CheckedTrial]) -> bool:
    """Return whether the evaluation losses of these runs are of the same documents, in the same tokens."""
    return len({each.eval_documents for each in checked}) == 1
