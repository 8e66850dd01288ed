"""Modules under the names that they had in 0.1: hooks, backends and their tests outside of dualtune import them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

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


class MovedModules:
    """Finds and loads a module by its old name; first, or a file below an old package would become a second copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, cast(Any, self), is_package=True) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module, which the moved one then replaces."""

    def exec_module(self, module: ModuleType) -> None:
        import warnings

        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(f"{old} is {new} now; the old name goes with 0.3", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def find_moved_modules() -> None:
    """Let `import` find them."""
    sys.meta_path.insert(0, MovedModules())
