"""The config.json of a base model: read as data, never a way to run code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dualtune.base_model.counts import EMBEDDING, TABLES_OF_POSITIONS, check_limits, decoder_table, tables_of
from dualtune.base_model.weights import BaseWeights, has_weights, weights_in
from dualtune.errors import ConfigError, FormatError
from dualtune.io import fields
from dualtune.io.fields import shown
from dualtune.io.inside import file_in
from dualtune.io.untrusted import read_json

MAX_CONFIG_BYTES = 4 << 20
# Keys by which a config makes a library import code or open arbitrary files.
REFUSED = {
    "model_file": "names Python code, which mlx-lm would run",
    "transformers_weights": "names another weight file",
}
# Names Python code for libraries that do not know the model_type. Those that do not run it need a model_type they know.
CODE = "auto_map"
# The implementation of attention. transformers takes any other name as a hub repository and loads a kernel from it.
ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
ATTENTION = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"}

# What some keys hold, at any depth of a config; null counts as absent. The libraries take any kind, and fail later.
_OBJECTS = {"quantization", "quantization_config", "rope_parameters", "rope_scaling", "text_config"}
_FLAGS = {"attention_bias", "mlp_bias", "rope_traditional", "tie_word_embeddings", "use_sliding_window"}
LARGEST = 1e15
_NUMBERS = {"rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "partial_rotary_factor",
            "sliding_window"}  # fmt: skip
_TEXTS = {"dtype", "hidden_act", "activation_function", "torch_dtype"}


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json of a model directory. FormatError if it is broken or could run code."""
    file = file_in(path, "config.json")
    config = read_json(file, max_bytes=MAX_CONFIG_BYTES, strict=False)
    fields.name(config, "model_type", file)  # used as a key of tables
    fields.texts(config, "architectures", file)
    for table in tables_of(config):
        _check_kinds(table, file)
    check_limits(config, file)
    for table in tables_of(config):
        for key in REFUSED.keys() & {name for name, value in table.items() if value}:
            raise FormatError(
                f"{file}: the key '{key}' {REFUSED[key]} ({shown(str(table[key]))}). dualtune runs no code of a model. "
                "If transformers and mlx-lm know the model_type themselves, copy the model's directory (hf download "
                f"NAME --local-dir DIR), remove '{key}' from its config.json, and use the copy"
            )
        for key in ATTENTION_KEYS:
            for name in _names(table.get(key)):
                if not isinstance(name, str) or name not in ATTENTION:
                    raise FormatError(
                        f"{file}: {key}: got {shown(repr(name))}, allowed: {', '.join(sorted(ATTENTION))}. Code of any "
                        "other name would be downloaded and run. Remove the key: the backend chooses its kernels"
                    )
    return config


def _check_kinds(table: Mapping[str, Any], file: Path) -> None:
    """Raise FormatError, with the key, for a value of a kind that no library can use."""
    for key in table.keys() & _OBJECTS:
        fields.subtable(table, key, file)
    for key in table.keys() & _TEXTS:
        fields.name(table, key, file)
    for key in table.keys() & (_FLAGS | _NUMBERS):
        value = table[key]
        if key in _FLAGS and (value is not None or key == "rope_traditional") and not isinstance(value, bool):
            raise fields.wrong(file, key, value, "true, false or null")
        number = 0.0 if value is None else fields.number(value)
        if key in _NUMBERS and (number is None or not 0 <= number < LARGEST):
            raise fields.wrong(file, key, value, f"a number from 0 to {LARGEST:g}, or null")


def ignored_code(config: Mapping[str, Any]) -> str | None:
    """Return a sentence if a config names code of its model, None if it does not."""
    if not any(table.get(CODE) for table in tables_of(dict(config))):
        return None
    return (
        f"config.json names code of the model ({CODE}); it is not run, transformers and mlx-lm have their own classes"
    )


def position_table_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of the position table, as in GPT-2; None if positions are computed and therefore unlimited."""
    key = "max_position_embeddings" if config.get("model_type") in TABLES_OF_POSITIONS else "n_positions"
    found = config.get(key)
    return found if isinstance(found, int) else None


def longest_text(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest text that the model was trained on; None if its config does not state it."""
    text = decoder_table(config)
    found = text.get("max_position_embeddings")
    return position_table_size(text) or (found if type(found) is int and found > 1 else None)


def _names(value: object) -> list[object]:
    """Return one name, or one per part of a model, as transformers accepts; an empty list if none is set."""
    if isinstance(value, dict):
        return [name for name in cast("dict[str, object]", value).values() if name is not None]
    return [] if value is None else [value]


def config_for_loaders(path: Path) -> dict[str, Any]:
    """Return the config of a model directory without the keys that could run code.

    `model.kernels` chooses the implementation of attention. Even a plain name of one may lead to the hub: without the
    package flash-attn, transformers downloads an equivalent kernel.
    """
    config = read_config(path)
    for table in tables_of(config):
        for key in (*REFUSED, CODE, *ATTENTION_KEYS):
            table.pop(key, None)
    return config


def check_storage(config: Mapping[str, Any], weights: BaseWeights) -> None:
    """Raise ConfigError if config.json says that the weights are packed as in MLX, but they are not."""
    is_packed = any(name.endswith(".scales") or t.dtype == "U32" for name, t in weights.tensors.items())
    if config.get("quantization") and not is_packed:
        raise ConfigError(
            f"model.name: the config.json in {weights.directory} says that it is quantized, but its weights are not. "
            "Remove the key 'quantization' there, or download the model again"
        )


def vocabulary_size(directory: Path) -> int | None:
    """Return the number of tokens that a model reads and writes, from its config or else its weights; None if unknown.

    Loading the model checks that both agree.
    """
    if not (directory / "config.json").is_file():
        return None
    config = read_config(directory)
    table = decoder_table(config)
    # A head of padded rows writes no token beyond the unpadded ones.
    sizes = [table[key] for key in ("vocab_size", "unpadded_vocab_size") if type(table.get(key)) is int]
    if sizes:
        return min(sizes)
    if not has_weights(directory):
        return None
    rows = [tensor.shape[0] for name, tensor in weights_in(directory).tensors.items() if EMBEDDING.fullmatch(name)]
    return rows[0] if len(rows) == 1 else None  # several: an encoder-decoder or image model


def stored_precision(config: Mapping[str, Any]) -> str | None:
    """Return the precision of plain weights by their config.json: float32, bfloat16 or float16; None without one."""
    stored = config.get("dtype") or config.get("torch_dtype")
    return stored if stored in ("float32", "bfloat16", "float16") else None
