"""A run directory as its report needs it: read with limits, without a tokenizer, a model or a backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import DualtuneError, FormatError
from dualtune.base.untrusted import open_file, read_json
from dualtune.config.load import BadYaml, read_yaml
from dualtune.show.report.curves import Curves, curves_of
from dualtune.train.health import RunVerdict, Score, scored_loss
from dualtune.train.profiler.analysis import AgainstPlan, against_plan
from dualtune.train.profiler.snapshot import read_timeline
from dualtune.train.state import checkpoint
from dualtune.train.state.listing import state_of
from dualtune.train.state.lock import read_note
from dualtune.train.state.metrics import each_row
from dualtune.train.state.run_dir import (
    ADAPTER,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    MODEL,
    TIMELINE,
    check_is_run,
)
from dualtune.train.verdict import verdict_of

MAX_TIMELINE_BYTES = 1 << 26
MAX_CONFIG_BYTES = 1 << 18
MAX_ENVIRONMENT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run directory holds."""

    path: Path
    name: str  # that of the directory, also of `.`; longer where another run has the same
    curves: Curves
    config: Mapping[str, Mapping[str, Any]]  # by section and key, as config.yaml has it; empty if there is none
    environment: Mapping[str, Any]  # environment.json; empty if there is none
    state: str  # done, running, preempted, killed or failed
    reason: str  # why it is not done

    @property
    def verdict(self) -> RunVerdict:
        """The verdict on what the run has recorded so far."""
        return verdict_of(self.curves.history)

    @property
    def score(self) -> Score:
        """What the run is compared by: the loss of the weights that it writes, as far as it has come."""
        history = self.curves.history
        best = self.setting("guards", "restore_best") is True
        return Score.of(history.losses, self._evals, history.step or 0, best=best)

    @property
    def against_plan(self) -> AgainstPlan | None:
        """The memory plan beside what it plans; None without a plan, or if no small file says what was used."""
        try:
            open_file(self.path / TIMELINE, max_bytes=MAX_TIMELINE_BYTES).close()
            return against_plan(read_timeline(self.path / TIMELINE), self.recorded("memory"))
        except (OSError, FormatError):
            return None

    @property
    def is_done(self) -> bool:
        """Whether the run was trained to its end."""
        return self.state == "done"

    @property
    def _evals(self) -> dict[int, float]:
        return {step: record.eval_loss for step, record in self.curves.history.evals.items()}

    @property
    def result(self) -> Path | None:
        """The adapter, or the trained model; None before the end."""
        return next((self.path / name for name in (ADAPTER, MODEL) if (self.path / name).is_dir()), None)

    def setting(self, section: str, key: str) -> Any:
        """Return a value of the config, None if it has none."""
        return self.config.get(section, {}).get(key)

    def recorded(self, key: str) -> dict[str, Any]:
        """Return an object of environment.json, empty if there is none."""
        return as_table(self.environment.get(key))


def read_run(path: Path) -> RunFiles:
    """Read a run directory. ConfigError if it is none, FormatError if a file in it is damaged."""
    try:
        check_is_run(path)
        curves = curves_of(each_row(path / METRICS))
        note, is_held = read_note(path)
        newest = next(iter(checkpoint.steps(path / CHECKPOINTS)), None)
        state, reason = state_of(path, note, is_held, newest)
        if is_held and curves.history.verdict is not None:  # the run itself writes this page
            state, reason = "done", ""
        name = path.resolve().name
        return RunFiles(path, name, curves, recorded_config(path), recorded_environment(path), state, reason)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_runs(paths: Sequence[Path]) -> tuple[list[RunFiles], list[str]]:
    """Return the runs, with names that tell them apart, and why others cannot be read.

    A single one that cannot is an error, and so are several if none can: ConfigError or FormatError.
    """
    runs: list[RunFiles] = []
    problems: list[str] = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except DualtuneError as error:
            problems.append(str(error))
            if len(problems) == len(paths):
                raise
    names = names_apart([run.path for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)], problems


def names_apart(paths: Sequence[Path]) -> list[str]:
    """Return for each path its last parts: as many as no other path ends with."""
    parts = [path.resolve().parts for path in paths]
    ends = Counter(own[-length:] for own in {*parts} for length in range(1, len(own) + 1))
    lengths = [next((n for n in range(1, len(own)) if ends[own[-n:]] == 1), len(own)) for own in parts]
    return [str(Path(*own[-length:])) for own, length in zip(parts, lengths, strict=True)]


def as_table(value: object) -> dict[str, Any]:
    """Return an object of JSON or YAML as it is, and anything else as an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def recorded_config(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the config of a run by section and key, empty if there is none. FormatError if it is damaged."""
    path = run_dir / CONFIG
    if not path.exists():
        return {}
    with open_file(path, max_bytes=MAX_CONFIG_BYTES, is_own=True) as file:
        data = file.read()
    try:
        table = as_table(read_yaml(data.decode(), str(path)).data)
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not UTF-8 text") from None
    except (BadYaml, ValueError) as error:
        raise FormatError(f"{path}: {str(error).splitlines()[0]}") from None
    return {section: inner for section, keys in table.items() if (inner := as_table(keys))}


def recorded_environment(run_dir: Path) -> dict[str, Any]:
    """Return the environment.json of a run, empty if there is none. FormatError if it is damaged."""
    path = run_dir / ENVIRONMENT
    return read_json(path, max_bytes=MAX_ENVIRONMENT_BYTES, is_own=True) if path.exists() else {}


def best_of(runs: Sequence[RunFiles]) -> RunFiles | None:
    """Return the run with the lowest score of those that were trained to their end; None if they cannot be compared."""
    judged = [run for run in runs if run.is_done and run.score.loss is not None]
    return min(judged, key=lambda run: run.score.order) if judged and are_comparable(runs) else None


def are_comparable(runs: Sequence[RunFiles]) -> bool:
    """Return whether the scores of the runs that are done are one loss of the same documents, in the same tokens."""
    return have_same_documents(runs) and have_same_loss(runs)


def have_same_documents(runs: Sequence[RunFiles]) -> bool:
    done = [run for run in runs if run.is_done and run.score.step]
    measured = {
        str(run.recorded("fingerprints").get("eval documents")) if run.score.is_held_out else None for run in done
    }
    return len(measured) <= 1


def have_same_loss(runs: Sequence[RunFiles]) -> bool:
    done = [run for run in runs if run.is_done and run.score.step]
    return len({scored_loss(run.config, held_out=run.score.is_held_out) for run in done}) <= 1
