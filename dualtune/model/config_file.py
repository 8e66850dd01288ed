"""The config.json of a base model: read as data, never a way to run code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from dualtune.base import fields
from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.fields import shown, wrong
from dualtune.base.files import file_in
from dualtune.base.untrusted import read_json
from dualtune.model.weight_files import BaseWeights, has_weights, weights_in

# ----------------------------------------------------------------------------------------------------------------------
# The counts of a config.json, bounded before anything is built from them.
#
# A library makes as many layers as a config asks for: 10 million of them hang it for hours in gigabytes, and no signal
# ends it. So no count may be above what the weight files hold, and without files none is above what any model has.

LAYERS = re.compile(r"(num|n)_(hidden_|decoder_|encoder_)?layers?|(en|de)coder_layers")
EXPERTS = re.compile(r"\w*(num|n)_\w*experts")
# Numbers by which the core and both libraries multiply and divide. Each is absent, null, or an integer >= 1.
SHAPE = re.compile(
    rf"{LAYERS.pattern}|(num|n)_(attention_heads|key_value_heads|heads?)|n_(embd|inner|positions)|head_dim"
    r"|(hidden|intermediate|vocab)_size|d_(model|inner)|ffn_dim"
)
# A mixture of experts may have no layer of that width. One of MAX_UNUSED is small beside an embedding.
UNUSED, MAX_UNUSED = re.compile(r"intermediate_size|d_inner|n_inner|ffn_dim"), 1 << 16
NUMBERED = re.compile(r"(.*?\.)??\d+\.")  # the name of a tensor up to its first number
TABLES_OF_POSITIONS = {"gpt_neo", "opt"}  # families with another key than n_positions for the number of positions
POSITIONS = re.compile(r"(.+\.)?(wpe|embed_positions)\.weight")
EMBEDDING = re.compile(r"(.+\.)?(embed_tokens|wte|embed_in|embeddings?|(word|tok)_embeddings)\.weight")
_PACKED = 16  # numbers of 2 bits, the smallest that MLX packs, in one of 32
# (keys, the largest value they may have). The largest of any published model are a quarter of these, or less.
MAX_LAYERS, MAX_COUNT = 1_000, 1 << 17
LIMITS = (
    (LAYERS, MAX_LAYERS),
    (re.compile(r"(num|n)_\w+"), MAX_COUNT),
    (re.compile(r"\w+_(size|dim|rank|layers|heads|experts|groups|blocks|channels|embeddings)|d_\w+"), 1 << 26),
)
MAX_LIST = 1 << 17


def tables_of(value: object) -> Iterator[dict[str, Any]]:
    """Yield the object and every object nested in it."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        yield table
        for inner in table.values():
            yield from tables_of(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from tables_of(inner)


def decoder_table(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model: its text_config, or all of it.

    Of several models side by side (Qwen Omni), the one called thinker writes text.
    """
    for name in ("thinker_config", "text_config"):
        part = config.get(name)
        config = cast("Mapping[str, Any]", part) if isinstance(part, dict) else config
    return config


def check_limits(config: Mapping[str, Any], file: Path) -> None:
    """Raise FormatError for a count of the wrong kind, or above that of any model, at any depth of a config."""
    table = decoder_table(config)
    for key, value in (*config.items(), *table.items()):
        if key == "head_dim" and value == 0 == table.get("qk_rope_head_dim"):
            continue  # transformers' name for the rotated part of a head, which a model without rotation has not
        sizes = _each(value)
        is_shape = value is None or (bool(sizes) and all(type(size) is int and size >= 1 for size in sizes))
        if SHAPE.fullmatch(key) and not is_shape:
            raise wrong(file, key, value, "an integer >= 1, or a list of them, one a layer")
    for key, value in ((key, value) for part in tables_of(config) for key, value in part.items()):
        values, longest = _each(value), MAX_LAYERS if "layer" in key else MAX_LIST
        if len(values) > longest:
            raise wrong(file, key, f"a list of {len(values):,}", f"a list of at most {longest:,}")
        limit = next((most for keys, most in LIMITS if keys.fullmatch(key)), None)
        for number in values:
            if limit is not None and isinstance(number, int | float) and not abs(number) <= limit:
                raise wrong(file, key, number, f"at most {limit:,}: no model has more")
    types, layers = _each(table.get("layer_types")), table.get("num_hidden_layers")
    if isinstance(table.get("layer_types"), list) and layers is not None and len(types) != layers:
        raise wrong(
            file, "layer_types", f"a list of {len(types):,}", f"one name for each of the {layers} num_hidden_layers"
        )


def _each(value: object) -> list[object]:
    """Return one value, or one a layer."""
    return cast("list[object]", value) if isinstance(value, list) else [value]


def check_counts(config: Mapping[str, Any], weights: BaseWeights) -> None:
    """Raise FormatError if a config asks for more layers, or wider ones, than its weight files hold.

    Only for more, because files may hold what the config does not count, such as layers that predict further tokens.
    That every tensor has its place is for the backend to check.
    """
    file, table, tensors = weights.directory / "config.json", decoder_table(config), weights.tensors
    layers = len({match[0] for name in tensors if (match := NUMBERED.match(name))})
    packing = _PACKED if any(tensor.dtype == "U32" for tensor in tensors.values()) else 1
    widest = packing * max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    positions = [tensor.shape[0] for name, tensor in tensors.items() if POSITIONS.fullmatch(name) and tensor.shape]
    of_positions = "max_position_embeddings" if table.get("model_type") in TABLES_OF_POSITIONS else "n_positions"
    is_recurrent = any(key.endswith("_cycles") for key in table)  # counts a layer each time that it is used
    for key, value in table.items():
        if LAYERS.fullmatch(key):
            _check_at_most(file, key, value, MAX_LAYERS if is_recurrent else layers or len(tensors), "layers")
        elif EXPERTS.fullmatch(key):
            _check_at_most(file, key, value, max(widest, len(tensors)), "experts, or rows of them")
        elif key == of_positions:
            _check_at_most(file, key, value, max(positions, default=MAX_COUNT), "positions")
        elif SHAPE.fullmatch(key) and key != "n_positions":
            most = max(widest, MAX_UNUSED) if UNUSED.fullmatch(key) else widest
            _check_at_most(file, key, value, most, "numbers in the longest row or column of any tensor")
    _check_embedding(file, table, weights)


def _check_at_most(file: Path, key: str, value: object, most: int, noun: str) -> None:
    for number in _each(value):
        if isinstance(number, int) and number > most:
            raise wrong(
                file, key, number, f"at most {most:,}: the weight files hold no more {noun}. Use the config.json and "
                "the weights of the same model"
            )  # fmt: skip


def _check_embedding(file: Path, table: Mapping[str, Any], weights: BaseWeights) -> None:
    """Compare the sizes of a config with a plain embedding, if there is one and only one."""
    tables = [tensor for name, tensor in weights.tensors.items() if EMBEDDING.fullmatch(name)]
    if len(tables) != 1 or len(tables[0].shape) != 2 or tables[0].dtype not in ("F32", "F16", "BF16"):
        return
    rows, columns = tables[0].shape
    _check_at_most(file, "vocab_size", table.get("vocab_size"), rows, "rows of the embedding")
    has_own_width = any(re.fullmatch(r"\w*embed\w*_(size|dim)", key) and value for key, value in table.items())
    for key in ("hidden_size", "n_embd"):
        if not has_own_width and (value := table.get(key)) is not None and value != columns:
            raise wrong(file, key, value, f"{columns}, the width of the embedding in the weight files")


# ----------------------------------------------------------------------------------------------------------------------
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
    size = config.get(key)
    return size if isinstance(size, int) else None


def longest_text(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest text that the model was trained on; None if its config does not state it."""
    text = decoder_table(config)
    positions = text.get("max_position_embeddings")
    return position_table_size(text) or (positions if type(positions) is int and positions > 1 else None)


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
