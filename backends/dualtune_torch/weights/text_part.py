"""The text part of a model: the classes of transformers that compute it, without the towers for images and sound.

Towers are models of their own inside a model. They are removed as soon as the model is built, so that their tensors are
neither read nor adapted; a merge copies them from the files. The small layers between a tower and the text model stay,
because some families call them for text too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from dualtune.errors import ConfigError

AUTO_CLASSES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)


def text_classes(config: PreTrainedConfig) -> list[tuple[Any, PreTrainedConfig]]:
    """Return the classes that compute the text part, best first, each with its config: the whole one, or that of text.

    Raises ConfigError for a model that transformers has no such class for, or that reads its input by an encoder.
    """
    found: dict[Any, PreTrainedConfig] = {}
    for auto in AUTO_CLASSES:
        if type(config) in auto._model_mapping:
            model_class = auto._model_mapping[type(config)]
            of_text = config.sub_configs.get("text_config")
            takes_text = of_text is not None and model_class.config_class is of_text and type(config) is not of_text
            found.setdefault(model_class, _text_config(config) if takes_text else config)
    if not found:
        raise ConfigError(
            f"model.name: transformers has no class that writes text for a model of type {config.model_type}. Use a "
            "causal language model, or one of images and text"
        )
    if config.is_encoder_decoder and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"model.name: a model of type {config.model_type} reads its input by an encoder, and dualtune trains "
            "models that read and write one text. Use a causal language model"
        )
    return [(_without_towers(model_class), own) for model_class, own in found.items()]


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    text: Any = config.get_text_config()
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        text.quantization_config = quantized
    return text


def _without_towers(model_class: Any) -> Any:
    """Return a class of the same name that has no towers; the class itself if its config has no parts."""
    if not getattr(model_class.config_class, "sub_configs", None):
        return model_class

    def build(self: Any, *args: Any, **options: Any) -> None:
        model_class.__init__(self, *args, **options)
        for path in list(_towers(self)):
            self.set_submodule(path, nn.Module())
            tied = self.all_tied_weights_keys
            self.all_tied_weights_keys = {k: v for k, v in tied.items() if not f"{k}.".startswith(f"{path}.")}

    # transformers takes its tables of names by the name of the class, and only for classes of its own modules.
    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})


def _towers(model: PreTrainedModel) -> Iterator[str]:
    """Yield the paths of the models inside a model that are made from another config than text."""
    kinds = {type(model.config), type(model.config.get_text_config(decoder=True))}
    needed = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    found: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or type(module.config) in kinds:
            continue
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not inside and not any(each is part for each in needed for part in module.modules()):
            found.append(path)
    yield from found


def text_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the text part by path: all of a plain decoder; else the text model and the output head."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is model or decoder is model.base_model:
        yield from model.named_modules()
        return
    inside = {id(module) for module in decoder.modules()}
    for path, module in model.named_modules():
        if id(module) in inside or module is head:
            yield path, module
