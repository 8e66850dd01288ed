"""Whether PEFT puts every tensor of an adapter where it belongs: tried with names and shapes, without numbers.

The model of transformers' auto class is built on the device `meta`, and PEFT itself wraps it and loads the adapter.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from dualtune_torch.counting import ERRORS, decoded
from dualtune_torch.weights.text_part import AUTO_CLASSES, class_of

_TRAINED = re.compile(r"\.(lora_|modules_to_save\.|token_adapter\.trainable_tokens_delta)")  # in names of PEFT's states
NAME = "default"  # PEFT's, of the only adapter of a model
MAX_REASON = 160  # characters of what PEFT says


def problems(
    config: Mapping[str, Any], adapter: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return what goes wrong in the model of each auto class that takes a config.json, "" if nothing does.

    `adapter` is an adapter_config.json, `shapes` are those of its tensors. A class that cannot be built here is left
    out.
    """
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return {}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    by_module: dict[str, str] = {}
    by_class: dict[type[PreTrainedModel], str] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of what is returned here
            for auto in AUTO_CLASSES:
                model = _empty(auto, CONFIG_MAPPING[kind].from_dict(decoded(dict(config))))
                if model is not None:
                    if type(model) not in by_class:
                        by_class[type(model)] = _problem(model, adapter, shapes)
                    by_module[auto.__name__] = by_class[type(model)]
    except ERRORS:
        return by_module
    finally:
        logging.set_verbosity(verbosity)
    return by_module


def _empty(auto: Any, config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the model that an auto class makes of a config, without numbers; None if it takes no such config."""
    model = class_of(type(config), auto)
    if model is None:
        return None
    with torch.device("meta"):
        if model.config_class is not type(config):  # the class of the text alone, as the auto class does
            config = config.get_text_config()
        return model._from_config(config)


def _problem(model: PreTrainedModel, adapter: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    options = {key: value for key, value in adapter.items() if key != "peft_type"}
    try:
        wrapped = get_peft_model(model, LoraConfig(**options), low_cpu_mem_usage=True)
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        result = set_peft_model_state_dict(wrapped, tensors, adapter_name=NAME, low_cpu_mem_usage=True)
    except Exception as error:  # noqa: BLE001  whatever it raises, a user of PEFT gets the same
        return f"it raises {type(error).__name__}: {_shortened(str(error))}"
    missing = set(result.missing_keys)
    loaded = [name for name in wrapped.state_dict() if _TRAINED.search(name) and name not in missing]
    lost = max(len(result.unexpected_keys), len(shapes) - len(loaded))
    if not lost:
        return ""
    example = f", such as {result.unexpected_keys[0]}" if result.unexpected_keys else ""
    return f"it drops {lost} of the {len(shapes)} tensors{example}"


def _shortened(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON].rsplit(' ', 1)[0]} …"
