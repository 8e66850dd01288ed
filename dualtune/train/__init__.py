"""The training loop and what prepares, guards and saves a run.

Importing this package replaces the function `dualtune.train` with the package, so the package is callable too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualtune.backend import Backend
    from dualtune.config import Config
    from dualtune.hooks import Hook
    from dualtune.train.prepare import Prepared
    from dualtune.train.run import TrainResult
    from dualtune.view.notebook import NotebookView


def train_on(
    config: Config | str | Path | Mapping[str, Any], platform: str = "auto", hooks: Sequence[Hook] = (), *,
    resume: str = "auto",
) -> TrainResult:  # fmt: skip
    """Train as `dualtune.train` does; see its docstring."""
    from dualtune.config import Config, load_config
    from dualtune.platform.choose import choose
    from dualtune.platform.deferred import deferred
    from dualtune.train.run import run

    settings = config if isinstance(config, Config) else load_config(config)
    backend = deferred(choose(platform))
    views = _in_notebook(settings, backend)

    def announce(prepared: Prepared) -> None:
        for view in views:
            view.adopt(prepared.config.run)

    return run(settings, backend, [*hooks, *views], resume=resume, announce=announce)


def _in_notebook(settings: Config, backend: Backend) -> list[NotebookView]:
    """Return what shows the run in a notebook, if this process is the kernel of one."""
    from dualtune.view.notebook import NotebookView, notebook_display
    from dualtune.view.run_view import RunView

    display, every = notebook_display(), settings.run
    if display is None or backend.world().rank > 0:
        return []
    view = RunView(every.eval_every, every.save_every, backend.memory, settings.memory.limit_bytes)
    return [NotebookView(view, every.log_every, display)]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> TrainResult:
        return train_on(*args, **options)


sys.modules[__name__].__class__ = _Callable
