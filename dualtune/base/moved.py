"""Modules under the names that they had in 0.1: hooks, backends and their tests outside of dualtune import them."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "dualtune.backend": "dualtune.engine.backend",
    "dualtune.card": "dualtune.engine.card",
    "dualtune.errors": "dualtune.base.errors",
    "dualtune.hooks": "dualtune.train.hooks",
    "dualtune.kernels": "dualtune.engine.kernels",
    "dualtune.optimizer": "dualtune.model.optimizer",
    "dualtune.policy": "dualtune.train.policy",
    "dualtune.profiler": "dualtune.train.profiler",
    "dualtune.profiler.profiler": "dualtune.train.profiler.profiler",
    "dualtune.testing": "dualtune.engine.testing",
    "dualtune.testing.conformance": "dualtune.engine.testing.conformance",
    "dualtune.testing.oracles": "dualtune.engine.testing.oracles",
    "dualtune.testing.tiny_models": "dualtune.engine.testing.tiny_models",
    "dualtune.testing.tolerances": "dualtune.engine.testing.tolerances",
    "dualtune.world": "dualtune.base.world",
}


class MovedModules(MetaPathFinder, Loader):
    """Finds a module by its old name, before the file of it below an old package could become a second copy of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} is {new} now; the old name goes with 0.3", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def find_moved_modules() -> None:
    """Let `import` find them."""
    sys.meta_path.insert(0, MovedModules())
