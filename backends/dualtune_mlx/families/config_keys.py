"""The config of a model with all keys that mlx-lm's classes read, from the config.json that transformers wrote.

transformers leaves out what has its default, stores a value under one of several names (`attribute_map`), and puts
what is about rotary embeddings into `rope_parameters`. mlx-lm's classes read the names of published files, and fall
back to defaults of their own without a word. So every value that transformers knows is given to them by every name it
has. What the file says itself is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dualtune_mlx.families.translations import translate

# What transformers' configs hold beside what describes the model.
UNRELATED = {"transformers_version", "dtype", "torch_dtype", "architectures", "id2label", "label2id", "_name_or_path"}


def complete(config: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the file lacks, for the model and for its text part. `decided`: keys that win over both."""
    theirs = _of_transformers(config)
    known = _decoded(dict(config)) | _lacking(config, theirs) | decided
    inner = config.get("text_config")
    if isinstance(inner, dict):
        text = _decoded(inner) | _lacking(inner, getattr(theirs, "text_config", None))
        if known.get("tie_word_embeddings") is not None:  # the model as a whole ties, and says so where it is stored
            text["tie_word_embeddings"] = known["tie_word_embeddings"]
        known["text_config"] = text | translate(text)
        if "vocab_size" in text:  # some classes take it beside the text part, with a default of their own
            known.setdefault("vocab_size", text["vocab_size"])
    known |= translate(known)
    return {key: value for key, value in known.items() if key not in config or config[key] != value}


def _of_transformers(config: Mapping[str, Any]) -> Any:
    """Return transformers' config of this model, None if it has none for this family or rejects the values."""
    from transformers import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return None
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception:  # noqa: BLE001  of any kind, by family: mlx-lm then gets the file's own keys, and judges them
        return None


def _lacking(config: Mapping[str, Any], theirs: Any) -> dict[str, Any]:
    """Return the values of transformers' config that are not null and that the file has not, by all their names."""
    found: dict[str, Any] = {}
    if theirs is not None:
        values = {name: value for name, value in theirs.to_dict().items() if name not in UNRELATED}
        values |= {alias: values.get(name) for alias, name in type(theirs).attribute_map.items()}
        values |= {
            "layers_block_type": getattr(theirs, "layers_block_type", None)
        }  # a property that follows from others
        if "sliding_window_pattern" in config:
            values.pop("layer_types", None)  # which transformers computes from a pattern of its own
        found = {name: value for name, value in values.items() if value is not None and config.get(name) is None}
    return found | _rotary(dict(config) | found)


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `rope_parameters` says, as the single keys of published files."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    found: dict[str, Any] = {}
    sliding = rope.get("sliding_attention")
    if isinstance(sliding, dict) and "rope_theta" in sliding:  # one rotary embedding for each kind of layer
        found |= {"rope_local_base_freq": sliding["rope_theta"], "swa_rope_theta": sliding["rope_theta"]}
    rope = rope.get("full_attention", rope)
    if not isinstance(rope, dict):
        return found
    found |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaled = rope.get("rope_type", "default") != "default"
    found["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None
    return {name: value for name, value in found.items() if config.get(name) is None}


def _decoded(value: Any) -> Any:
    """Return a value of config.json with the numbers that JSON has not, as transformers writes them."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return {"Infinity": math.inf, "-Infinity": -math.inf}.get(value["__float__"], math.nan)
        return {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value
