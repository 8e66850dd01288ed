"""A run as a person sees it: its log, its trackers, its page, and in a notebook a table with a curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtune.base.files import write_file
from dualtune.config import Config, load_config
from dualtune.engine.choose import choose
from dualtune.engine.deferred import deferred
from dualtune.show.report.run_page import run_page
from dualtune.show.summary import summary
from dualtune.show.trackers.tracker import TrackerProcesses, check_installed
from dualtune.show.view.lines import RunLog, log_result
from dualtune.show.view.notebook import NotebookView, notebook_display
from dualtune.show.view.run_view import RunView
from dualtune.train import run as training
from dualtune.train.hooks import Hook
from dualtune.train.state.run_dir import LOG, REPORT

if TYPE_CHECKING:
    from dualtune.engine.backend import Backend
    from dualtune.train.prepare import Prepared
    from dualtune.train.run import TrainResult


class RunDisplay(training.Display):
    """The log and the page in the run directory, and the trackers of `run.track`."""

    def check(self, config: Config) -> None:
        check_installed(config.run.track)

    def hooks(self, prepared: Prepared, run_dir: Path) -> Sequence[Hook]:
        every = prepared.config.run
        view, first = RunView(every.eval_every, every.save_every), [*summary(prepared), *prepared.memory.lines()]
        log = RunLog(run_dir / LOG, view, every.log_every, first)
        return [log, *([TrackerProcesses(run_dir, every.track)] if every.track else [])]

    def write_report(self, run_dir: Path) -> None:
        write_file(run_dir / REPORT, run_page([run_dir]))

    def log_result(self, run_dir: Path, result: Path) -> None:
        log_result(run_dir / LOG, result.name, result)


DISPLAY = RunDisplay()
run = partial(training.run, display=DISPLAY)
execute = partial(training.execute, display=DISPLAY)


def train_on(
    config: Config | str | Path | Mapping[str, Any], platform: str = "auto", hooks: Sequence[Hook] = (), *,
    resume: str = "auto",
) -> TrainResult:  # fmt: skip
    """Train as `dualtune.train` does; see its docstring."""
    settings = config if isinstance(config, Config) else load_config(config)
    backend = deferred(choose(platform))
    views = _in_notebook(settings, backend)

    def announce(prepared: Prepared) -> None:
        for view in views:
            view.adopt(prepared.config.run)

    return run(settings, backend, [*hooks, *views], resume=resume, announce=announce)


def _in_notebook(settings: Config, backend: Backend) -> list[NotebookView]:
    """Return what shows the run in a notebook, if this process is the kernel of one."""
    display, every = notebook_display(), settings.run
    if display is None or backend.world().rank > 0:
        return []
    view = RunView(every.eval_every, every.save_every, backend.memory, settings.memory.limit_bytes)
    return [NotebookView(view, every.log_every, display)]
