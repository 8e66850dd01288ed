"""The counts of a config.json, bounded before anything is built from them.

A library makes as many layers as a config asks for: 10 million of them hang it for hours in gigabytes, and no signal
ends it. So no count may be above what the weight files hold, and without files none is above what any model has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from dualtune.base_model.weights import BaseWeights
from dualtune.io.fields import wrong

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
        if SHAPE.fullmatch(key) and not _is_shape(value):
            raise wrong(file, key, value, "an integer >= 1, or a list of them, one a layer")
    for part in tables_of(config):
        for key, value in part.items():
            _check_limit(key, value, file)
    types, layers = table.get("layer_types"), table.get("num_hidden_layers")
    if isinstance(types, list) and layers is not None and (size := len(cast("list[Any]", types))) != layers:
        raise wrong(file, "layer_types", f"a list of {size:,}", f"one name for each of the {layers} num_hidden_layers")


def _is_shape(value: object) -> bool:
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    return value is None or (bool(values) and all(type(each) is int and each >= 1 for each in values))


def _check_limit(key: str, value: object, file: Path) -> None:
    if isinstance(value, list):
        size, most = len(cast("list[Any]", value)), MAX_LAYERS if "layer" in key else MAX_LIST
        if size > most:
            raise wrong(file, key, f"a list of {size:,}", f"a list of at most {most:,}")
    limit = next((most for keys, most in LIMITS if keys.fullmatch(key)), None)
    for number in cast("list[object]", value) if isinstance(value, list) else [value]:
        if limit is not None and isinstance(number, int | float) and not abs(number) <= limit:
            raise wrong(file, key, number, f"at most {limit:,}: no model has more")


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


def _check_at_most(file: Path, key: str, value: object, most: int, what: str) -> None:
    for number in cast("list[object]", value) if isinstance(value, list) else [value]:
        if isinstance(number, int) and number > most:
            raise wrong(
                file, key, number, f"at most {most:,}: the weight files hold no more {what}. Use the config.json and "
                "the weights of the same model"
            )  # fmt: skip


def _check_embedding(file: Path, table: Mapping[str, Any], weights: BaseWeights) -> None:
    """Compare the sizes of a config with a plain embedding, if there is one and only one."""
    found = [tensor for name, tensor in weights.tensors.items() if EMBEDDING.fullmatch(name)]
    if len(found) != 1 or len(found[0].shape) != 2 or found[0].dtype not in ("F32", "F16", "BF16"):
        return
    rows, columns = found[0].shape
    _check_at_most(file, "vocab_size", table.get("vocab_size"), rows, "rows of the embedding")
    has_own_width = any(re.fullmatch(r"\w*embed\w*_(size|dim)", key) and value for key, value in table.items())
    for key in ("hidden_size", "n_embd"):
        if not has_own_width and (value := table.get(key)) is not None and value != columns:
            raise wrong(file, key, value, f"{columns}, the width of the embedding in the weight files")
