"""Selection of a model's linear layers by a list of targets. Without NumPy, so that a memory estimate starts fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dualtune.errors import ConfigError

Shapes = Mapping[str, tuple[int, int]]  # module path -> (out, in) of its weight

ALL_LINEAR = "all-linear"
OUTPUT_HEAD = "lm_head"


def is_target(module: str, targets: Iterable[str]) -> bool:
    """Match a list of names as in PEFT: the whole path, or its last components."""
    return any(module == target or module.endswith("." + target) for target in targets)


def select_modules(available: Shapes, targets: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a model that the targets select, in sorted order.

    "all-linear" means all linear layers except the output head, as in PEFT. ConfigError, with the names in the model,
    if a target selects nothing.
    """
    selected: dict[str, tuple[int, int]] = {}
    for target in targets:
        found = [
            module
            for module in available
            if (module.split(".")[-1] != OUTPUT_HEAD if target == ALL_LINEAR else is_target(module, (target,)))
        ]
        if not found:
            names = sorted({module.split(".")[-1] for module in available})
            raise ConfigError(
                f"adapter.targets: no linear layer is called '{target}'. This model has: {', '.join(names) or 'none'}. "
                f"Use --set adapter.targets={ALL_LINEAR}, or names: --set 'adapter.targets=[{', '.join(names[:2])}]'"
            )
        selected |= {module: available[module] for module in found}
    return dict(sorted(selected.items()))
