"""The training loop and what prepares, guards and saves a run.

Importing this package replaces the function `dualtune.train` with the package, so the package is callable too.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("dualtune.show.run").train_on(*args, **options)  # a room below: found late


sys.modules[__name__].__class__ = _Callable
