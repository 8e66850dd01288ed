"""The example configs: `configs/` in a clone, included in the wheel beside the code."""

from __future__ import annotations

from pathlib import Path

from dualtune.errors import ConfigError


def example_names() -> list[str]:
    """Return the names of the examples, sorted."""
    return sorted(path.stem for path in _directory().glob("*.yaml"))


def example_path(name: str) -> Path:
    """Return the file of an example, named with or without `.yaml`. Raises ConfigError for an unknown name."""
    names = example_names()
    if (stem := name.removesuffix(".yaml")) not in names:
        raise ConfigError(f"example config: got '{name}', allowed: {', '.join(names)}")
    return _directory() / f"{stem}.yaml"


def title(path: Path) -> str:
    """Return the first sentence of the first comment, which is the purpose of the example."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip().partition(". ")[0].rstrip(".")


def _directory() -> Path:
    package = Path(__file__).parents[1]
    in_wheel = package / "configs"
    return in_wheel if in_wheel.is_dir() else package.parent / "configs"
