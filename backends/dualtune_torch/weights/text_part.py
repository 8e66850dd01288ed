"""The part of a model that reads and writes text: towers for images and sound are left out, with their tensors.

A multimodal model of transformers is a text decoder, an embedding and a head within a wrapper that adds towers. Text
never runs through these, so they take neither memory nor adapters; a merge copies their tensors from the base's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)

from dualtune.base.errors import ConfigError

# In this order: the first that has a class for a config.
AUTO_CLASSES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the text part of a config's model with initial weights, on the device of the context."""
    kind, config = text_model(config)
    return cast(Any, kind)._from_config(config, dtype=dtype)


def text_model(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class that computes a config's model without its towers, and the config that this class takes."""
    kind, text_config = whole_class(config), config.get_text_config()
    if kind.forward is nn.Module.forward:  # several models side by side (Qwen Omni): one of them writes text
        return text_model(_writing_part(config))
    if text_config is config:
        return kind, config
    if kind.config_class is type(text_config):
        # As the Auto classes do: a class of the text alone, whose weights may be quantized as the whole model's.
        if (stored := getattr(config, "quantization_config", None)) is not None:
            text_config.quantization_config = stored
        return kind, text_config
    return _without_towers(kind), config


def _writing_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config within a config of the only model with a class that writes text. ConfigError if not one is."""
    parts = [getattr(config, name) for name in config.sub_configs]
    writing = [part for part in parts if any(class_of(type(part), auto) for auto in AUTO_CLASSES)]
    if len(writing) != 1:
        raise ConfigError(
            f"model.name: a model of model_type '{config.model_type}' is {len(parts)} models, of which {len(writing)} "
            "write text. Allowed: one model that writes text; give the files of one of them"
        )
    return writing[0]


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class for a config. ConfigError if it knows none that writes text token by token."""
    _check_saved_class(config)
    for kind in filter(None, (class_of(type(config), auto) for auto in AUTO_CLASSES)):
        _check_generates(kind)
        # A class of the text alone that no Auto class loads again has other names than the files of the whole.
        if kind.config_class is type(config) or any(class_of(kind.config_class, auto) for auto in AUTO_CLASSES):
            return kind
    raise ConfigError(
        f"model.name: transformers has no class that writes text for model_type '{config.model_type}'. Allowed: "
        "models that AutoModelForCausalLM, AutoModelForImageTextToText or AutoModelForMultimodalLM load"
    )


def _check_saved_class(config: PreTrainedConfig) -> None:
    """Raise ConfigError if the files are of a class with another head, such as a classifier's."""
    named = (getattr(transformers, name, None) for name in config.architectures or () if "For" in name)
    if kind := next((kind for kind in named if isinstance(kind, type)), None):
        _check_generates(kind)


def _check_generates(kind: type) -> None:
    if not issubclass(kind, GenerationMixin):
        raise ConfigError(
            f"model.name: the model is a {kind.__name__}, which does not write text one token after another. Allowed: "
            "models that predict each token from those before it"
        )


def class_of(config_class: Any, auto: Any) -> Any:
    """Return the class that an Auto class has for a kind of config, None if it has none."""
    kind = auto._model_mapping.get(config_class, None)
    return kind[0] if isinstance(kind, tuple) else kind


class Absent(nn.Module):
    """What is left of a tower. Some classes ask theirs where it lies before they look whether there is an input."""

    device, dtype = torch.device("cpu"), torch.float32


@cache
def _without_towers(kind: Any) -> Any:
    def build(self: Any, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        paths = list(_towers(self))
        for path in paths:
            self.set_submodule(path, Absent())
        patterns = {rf"^{re.escape(path)}\." for path in paths}
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *patterns}

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def _towers(model: Any) -> Iterator[str]:
    """Yield the paths of modules with weights that have no part in the decoder, the embedding or the head."""
    needed = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    whole = {id(part) for module in needed if module is not None for part in module.modules()}
    around = {id(m) for m in model.modules() if any(id(part) in whole for part in m.modules())}

    def outside(module: nn.Module, path: str) -> Iterator[str]:
        for name, child in module.named_children():
            if id(child) in whole:
                continue
            if id(child) in around:
                yield from outside(child, f"{path}{name}.")
            elif any(True for _ in child.parameters()) and not hasattr(child, "vocab_offset"):
                # With an offset it embeds the tokens from there on, and is asked for each token (Gemma 3n).
                yield f"{path}{name}"

    yield from outside(model, "")
