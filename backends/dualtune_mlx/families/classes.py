"""Which class computes a model, and what mlx-lm's classes need before they compute what transformers computes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import _get_classes

from dualtune.base.errors import ConfigError
from dualtune_mlx.families import gpt2
from dualtune_mlx.families.corrections import CORRECTIONS, correct_frequencies
from dualtune_mlx.families.layouts import LAYOUTS

TEXT = "_text"  # the end of the model_type of a text part, which transformers stores by itself too


def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Return the class of the model and that of its arguments. ValueError, as mlx-lm, if it has none."""
    kind = config["model_type"]
    if kind == "gpt2":
        return gpt2.classes(config)
    whole = _whole(config)
    model_class, args_class = _of_mlx_lm(config | {"model_type": whole or kind})
    if whole is None:
        _check_keys(args_class, config)
    return _as_transformers(whole or kind, model_class, config, is_text=whole is not None), _of_text(args_class, whole)


def _whole(config: Mapping[str, Any]) -> str | None:
    """Return the family of whose wrapper this model is the text part, if only the wrapper has a class."""
    kind = config["model_type"]
    if not kind.endswith(TEXT):
        return None
    if kind == "llama4_text":  # mlx-lm's class of this name has no experts
        return "llama4" if config.get("moe_layers") else None
    return None if _has_class(kind) else kind.removesuffix(TEXT)


def _check_keys(args_class: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError, as for an unknown family, if the config lacks what the arguments of a class need."""
    fields = dataclasses.fields(args_class) if dataclasses.is_dataclass(args_class) else ()
    needed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in config]:
        raise ValueError(f"its class for '{config['model_type']}' needs {', '.join(missing)} in config.json")


def _has_class(kind: str) -> bool:
    try:
        _of_mlx_lm({"model_type": kind})
    except ValueError:
        return False
    return True


def _of_mlx_lm(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    kind = config["model_type"]
    try:
        return _get_classes(config)
    except ValueError as error:
        raise ValueError(f"mlx-lm {version('mlx-lm')} knows no model_type '{kind}'") from error
    except SystemExit as error:  # a class that ends the process without a package of its own
        raise ConfigError(
            f"model.name: mlx-lm computes a '{kind}' of another layout than transformers, and needs a "
            "package for it. Train this model with --platform cpu or cuda"
        ) from error


def _of_text(args_class: Any, whole: str | None) -> type:
    """Return the class of arguments; for a text part, one that puts the config into the place of a text part."""
    if whole is None:
        return args_class

    class TextArgs:
        @staticmethod
        def from_dict(config: dict[str, Any]) -> Any:
            outer = {"model_type": whole, "text_config": config, "vocab_size": config["vocab_size"]}
            return args_class.from_dict(outer)

    return TextArgs


def _as_transformers(
    kind: str, model_class: type[nn.Module], config: Mapping[str, Any], *, is_text: bool
) -> type[nn.Module]:
    """Return the class with what its family needs: a layout of files, and corrected modules."""
    layout, correct = LAYOUTS.get(kind), CORRECTIONS.get(kind)

    class AsTransformers(model_class):
        def __init__(self, args: Any) -> None:
            nn.Module.__init__(self)  # which not every class calls
            cast(Any, super()).__init__(args)
            if correct is not None:
                correct(self, config)
            correct_frequencies(self, config)
            for module in self.modules():
                _accept_no_cache(module)
                if hasattr(module, "sanitize"):
                    module.__class__ = _patient(type(module))

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if is_text:
                weights = {f"language_model.{name}": array for name, array in weights.items()}
            if layout is not None:
                weights = layout(weights, config)
            sanitize: Any = getattr(super(), "sanitize", None)
            return weights if sanitize is None else sanitize(weights)

    AsTransformers.__module__, AsTransformers.__name__ = model_class.__module__, model_class.__name__
    return AsTransformers


def _accept_no_cache(module: nn.Module) -> None:
    """Make a body that requires a cache compute without one."""
    parameters = inspect.signature(type(module).__call__).parameters
    if list(parameters)[1:] == ["x", "cache"] and parameters["cache"].default is inspect.Parameter.empty:
        module.__class__ = _without_cache(type(module))


@cache
def _without_cache(kind: type[nn.Module]) -> type[nn.Module]:
    class WithoutCache(kind):
        def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
            return super().__call__(x, cache)

    WithoutCache.__module__, WithoutCache.__name__ = kind.__module__, kind.__name__
    return WithoutCache


@cache
def _patient(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class with a `pop` for a `sanitize` that takes away the head of a tied model whenever it is called."""

    class Patient(kind):
        def pop(self, key: str, default: Any = None) -> Any:
            return super().pop(key, default)

    Patient.__module__, Patient.__name__ = kind.__module__, kind.__name__
    return Patient
