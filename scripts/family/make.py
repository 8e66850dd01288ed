"""A tiny model of a family with random weights, saved as transformers saves it, with a tokenizer and data.

The weights are larger than those of a new model: with a deviation of 0.02 a model computes nearly the same with a wrong
norm, mask or position as with a right one.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, cast

from family.quirks import QUIRKS
from family.shrink import shrink

MAX_PARAMETERS = 20_000_000
SPECIAL = ("<pad>", "<s>", "</s>")
CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")


class CannotMake(Exception):
    """The script has no tiny config for a family. This says nothing of dualtune."""


def transformers_names() -> list[str]:
    """Return the families that transformers loads as a model of text."""
    from transformers.models.auto import modeling_auto as auto

    causal, image, multimodal = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    return sorted({*causal, *image, *multimodal})


def tiny_config(family: str) -> Any:
    """Return the tiny config of a family. CannotMake if its class does not take it."""
    from transformers import CONFIG_MAPPING

    kind, change = CONFIG_MAPPING[family], QUIRKS.get(family)
    try:
        defaults = kind().to_dict()
        small = shrink({k: v for k, v in defaults.items() if k not in {"id2label", "label2id", "transformers_version"}})
        if change:
            change(small)
        return kind(**small)
    except Exception as error:
        raise CannotMake(f"config: {type(error).__name__}: {error}") from error


def auto_class(config: Any) -> Any:
    """Return the class of transformers that a user loads this model with."""
    return auto_classes(config)[0]


def auto_classes(config: Any) -> list[Any]:
    """Return all classes of transformers that load this model, the first of them first."""
    import transformers

    kinds = [getattr(transformers, name) for name in CLASSES]
    mapped = [kind for kind in kinds if type(config) in kind._model_mapping]
    if found := [kind for kind in mapped if _is_known(kind._model_mapping[type(config)].config_class, config)]:
        return found
    raise CannotMake(f"class: none of {', '.join(CLASSES)} takes a {type(config).__name__}")


def _is_known(saved: type, config: Any) -> bool:
    """Whether a model of a class whose saved config is of this type is loaded again: a text part alone may not be."""
    return saved is type(config) or cast(Any, saved).model_type in transformers_names()


def make(family: str, directory: Path) -> int:
    """Write the model with tokenizer and data to a directory. Return its number of parameters."""
    import torch

    config = tiny_config(family)
    kind = auto_class(config)
    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in kind.from_config(config).parameters())
    except Exception as error:
        raise CannotMake(f"model: {type(error).__name__}: {error}") from error
    if size > MAX_PARAMETERS:
        raise CannotMake(f"size: {size:,} parameters are no tiny model")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind.from_config(config, dtype=torch.float32)
        _randomize(model)
        try:
            model.save_pretrained(directory)
        except Exception as error:
            raise CannotMake(f"save: {type(error).__name__}: {error}") from error
        _check_loads_again(kind, directory)
    write_tokenizer(directory)
    return size


def _check_loads_again(kind: Any, directory: Path) -> None:
    try:
        told = kind.from_pretrained(directory, output_loading_info=True)[1]
    except OSError as error:  # a file besides the model
        raise CannotMake(f"save: {error}") from error
    if lost := told["missing_keys"]:
        raise CannotMake(f"save: transformers does not find {len(lost)} tensors of its own file, such as {min(lost)}")


def _randomize(model: Any) -> None:
    """Give matrices the deviation that keeps the size of their input, and norms and biases some of their own."""
    import torch

    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.ndim >= 2:
                each.normal_(0, 1 / each.shape[-1] ** 0.5)
            elif not name.endswith(("A_log", "dt_bias", "time_decay", "time_first", "a_param")):
                each.add_(torch.randn_like(each) * 0.1)


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with a token for each byte, as every vocabulary here has room for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # type: ignore[assignment]
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def write_data(file: Path) -> None:
    """Write sixteen rows of different lengths, most of them longer than the small sliding window."""
    rows = [{"prompt": f"{a} and {a * b}", "completion": " is " + f"{a + b}, " * (1 + a % 4)} for a, b in
            ((n, 7 * n % 10) for n in range(3, 19))]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
