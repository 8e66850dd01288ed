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
    from dualtune.config import Config
    from dualtune.hooks import Hook
    from dualtune.train.run import TrainResult


def train_on(
    config: Config | str | Path | Mapping[str, Any], platform: str = "auto", hooks: Sequence[Hook] = (), *,
    resume: str = "auto",
) -> TrainResult:  # fmt: skip
    """Train as `dualtune.train` does; see its docstring."""
    from dualtune.config import Config, load_config
    from dualtune.platform.choose import choose, open_backend
    from dualtune.train.run import run

    settings = config if isinstance(config, Config) else load_config(config)
    return run(settings, open_backend(choose(platform)), hooks, resume=resume)


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> TrainResult:
        return train_on(*args, **options)


sys.modules[__name__].__class__ = _Callable
