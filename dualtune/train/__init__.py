"""The training loop and what surrounds it: schedule, metrics, run directory, checkpoints, generation."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import dualtune


class _Callable(ModuleType):
    """`dualtune.train(config)` is the library's function, also once this package has taken its name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return dualtune._train(*args, **options)  # pyright: ignore[reportPrivateUsage]


sys.modules[__name__].__class__ = _Callable
