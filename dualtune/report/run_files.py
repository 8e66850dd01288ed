"""A run directory as its report needs it: read with limits, without a tokenizer, a model or a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualtune.config.reader import BadYaml, read_yaml
from dualtune.errors import ConfigError, FormatError
from dualtune.io.untrusted import open_file, read_json
from dualtune.report.curves import Curves, curves_of
from dualtune.train.health.verdict import RunVerdict, judge
from dualtune.train.state import checkpoint
from dualtune.train.state.listing import state_of
from dualtune.train.state.lock import read_note
from dualtune.train.state.metrics import each_row
from dualtune.train.state.run_dir import ADAPTER, CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS, MODEL, is_run_dir

MAX_METRICS_BYTES = 1 << 30  # about four million steps
MAX_CONFIG_BYTES = 1 << 18
MAX_ENVIRONMENT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run directory holds."""

    path: Path
    curves: Curves
    config: Mapping[str, Mapping[str, Any]]  # by section and key, as config.yaml has it; empty if there is none
    environment: Mapping[str, Any]  # environment.json; empty if there is none
    state: str  # done, running, preempted, killed or failed
    reason: str  # why it is not done

    @property
    def name(self) -> str:
        """The name of the directory, also of `.`."""
        return self.path.resolve().name

    @property
    def verdict(self) -> RunVerdict:
        """The verdict on what the run has recorded so far."""
        history = self.curves.history
        return judge(history.losses, {step: record.eval_loss for step, record in history.evals.items()})

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
        if not is_run_dir(path):
            raise ConfigError(f"{path}: is not a run directory. To find run directories: dualtune runs DIRECTORY")
        curves = _curves(path / METRICS)
        note, is_held = read_note(path)
        newest = next(iter(checkpoint.steps(path / CHECKPOINTS)), None)
        state, reason = state_of(path, note, is_held, newest)
        if is_held and curves.history.verdict is not None:  # the run itself writes this page
            state, reason = "done", ""
        return RunFiles(path, curves, recorded_config(path), recorded_environment(path), state, reason)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None


def as_table(value: object) -> dict[str, Any]:
    """Return an object of JSON or YAML as it is, and anything else as an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _curves(path: Path) -> Curves:
    if not path.exists() and not path.is_symlink():
        return Curves()
    with open_file(path):  # no pipe, no directory
        size = path.stat().st_size
    if size > MAX_METRICS_BYTES:
        raise FormatError(f"{path}: {size} bytes, at most {MAX_METRICS_BYTES} are allowed")
    return curves_of(each_row(path))


def recorded_config(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the config of a run by section and key, empty if there is none. FormatError if it is damaged."""
    path = run_dir / CONFIG
    if not path.exists():
        return {}
    with open_file(path) as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    try:
        if len(text) > MAX_CONFIG_BYTES:
            raise FormatError(f"{path}: more than {MAX_CONFIG_BYTES} bytes are not allowed")
        table = as_table(read_yaml(text.decode(), str(path)).data)
    except (BadYaml, ValueError) as error:
        raise FormatError(f"{path}: {str(error).splitlines()[0]}") from None
    return {section: inner for section, keys in table.items() if (inner := as_table(keys))}


def recorded_environment(run_dir: Path) -> dict[str, Any]:
    """Return the environment.json of a run, empty if there is none. FormatError if it is damaged."""
    path = run_dir / ENVIRONMENT
    return read_json(path, max_bytes=MAX_ENVIRONMENT_BYTES) if path.exists() else {}


def are_comparable(runs: Sequence[RunFiles]) -> bool:
    """Return whether the evaluation losses of these runs are of the same documents, in the same tokens."""
    evaluated = [run for run in runs if run.curves.evals]
    return len({str(run.recorded("fingerprints").get("eval documents")) for run in evaluated}) <= 1
