"""The config of a model with all keys that mlx-lm's classes read, from the config.json that transformers wrote.

transformers leaves out what has its default, stores a value under one of several names (`attribute_map`), and puts
what is about rotary embeddings into `rope_parameters`. mlx-lm's classes read the names of published files, and fall
back to defaults of their own without a word. So every value that transformers knows is given to them by every name it
has. What the file says itself is never changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, cast

from dualtune.base_model.spellings.translations import translate

# What transformers' configs hold beside what describes the model.
UNRELATED = {
    "transformers_version", "dtype", "torch_dtype", "architectures", "id2label", "label2id", "_name_or_path",
    "output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "problem_type",
    "is_encoder_decoder",
}  # fmt: skip


def both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with what mlx-lm reads too, in so far as transformers reads the same model from it."""
    theirs, full = _values(config), dict(config) | complete(config, {})
    if theirs is not None and _agrees(_values(full), theirs):
        return full
    result = copy.deepcopy(dict(config))
    for part in ("text_config", None):
        old, new = (each.get(part) or {} if part else each for each in (result, full))
        for key in [key for key in new if key != "text_config" and (key not in old or old[key] != new[key])]:
            before = dict(old)
            old[key] = new[key]
            # Where only mlx-lm reads the file, it reads what is there.
            if key in before if theirs is None else not _agrees(_values(result), theirs):
                old.clear()
                old.update(before)
    return result


def _values(config: Mapping[str, Any]) -> Any:
    """Return all values that transformers reads from a config.json, None if it does not know the model."""
    found = _of_transformers(config)
    return None if found is None else found.to_dict()


def _agrees(found: Any, expected: Any) -> bool:
    """Return whether all that is expected was found, whatever else was."""
    if not (isinstance(expected, dict) and isinstance(found, dict)):
        return found == expected
    all_found, needed = cast("dict[str, Any]", found), cast("dict[str, Any]", expected)
    return all(key in all_found and _agrees(all_found[key], value) for key, value in needed.items())


def complete(config: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the file lacks, for the model and for its text part. `decided`: keys that win over both."""
    theirs = _of_transformers(config)
    known = _decoded(dict(config)) | _lacking(config, theirs) | decided
    inner = _table(config, "text_config")
    if inner is not None:
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
        make: Any = CONFIG_MAPPING[kind]
        return make.from_dict(_decoded(dict(config)))
    except Exception:  # noqa: BLE001  of any kind, by family: mlx-lm then gets the file's own keys, and judges them
        return None


def _lacking(config: Mapping[str, Any], theirs: Any) -> dict[str, Any]:
    """Return the values of transformers' config that are not null and that the file has not, by all their names."""
    found: dict[str, Any] = {}
    if theirs is not None:
        values = {name: value for name, value in theirs.to_dict().items() if name not in UNRELATED}
        aliases = cast("dict[str, str]", theirs.attribute_map)
        values |= {alias: values.get(name) for alias, name in aliases.items()}
        values |= {
            "layers_block_type": getattr(theirs, "layers_block_type", None)
        }  # a property that follows from others
        if "sliding_window_pattern" in config:
            values.pop("layer_types", None)  # which transformers computes from a pattern of its own
        found = {name: value for name, value in values.items() if value is not None and config.get(name) is None}
    return found | _rotary(dict(config) | found)


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `rope_parameters` says, as the single keys of published files."""
    rope = _table(config, "rope_parameters")
    if rope is None:
        return {}
    found: dict[str, Any] = {}
    sliding = _table(rope, "sliding_attention")
    if sliding is not None and "rope_theta" in sliding:  # one rotary embedding for each kind of layer
        found |= {"rope_local_base_freq": sliding["rope_theta"], "swa_rope_theta": sliding["rope_theta"]}
    if "full_attention" in rope:
        rope = _table(rope, "full_attention")
    if rope is None:
        return found
    found |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaled = rope.get("rope_type", "default") != "default"
    found["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None
    return {name: value for name, value in found.items() if config.get(name) is None}


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Return the object of a key, None if it holds none."""
    value = config.get(key)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _decoded(value: Any) -> Any:
    """Return a value of config.json with the numbers that JSON has not, as transformers writes them."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        if table.keys() == {"__float__"}:
            return {"Infinity": math.inf, "-Infinity": -math.inf}.get(table["__float__"], math.nan)
        return {key: _decoded(each) for key, each in table.items()}
    return [_decoded(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value
