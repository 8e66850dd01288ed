"""The config of a model with all keys that mlx-lm's classes read, from the config.json that transformers wrote.

transformers leaves out what has its default, stores a value under one of several names (`attribute_map`), and puts
what is about rotary embeddings into `rope_parameters`. mlx-lm's classes read the names of published files, and fall
back to defaults of their own without a word. So every value that transformers knows is given to them by every name it
has. What the file says itself is never changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

# ----------------------------------------------------------------------------------------------------------------------
# Keys that mlx-lm's classes read and transformers has under no name, computed from those that it has.

Keys = Mapping[str, Any]

# What transformers 5 calls a kind of layer, and what some classes of mlx-lm compare with.
MAMBA_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def translate(config: Keys) -> dict[str, Any]:
    """Return the keys that this model needs beside its own: those of any family, and those of this one."""
    general: dict[str, Any] = {}
    # The size of heads, where it is left to follow from the hidden size.
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        general["head_dim"] = hidden // heads
    # The period of layers with full attention, where the layers are listed one by one.
    kinds: list[str] = config.get("layer_types") or []
    if "full_attention" in kinds and len(set(kinds)) > 1:
        period = kinds.index("full_attention") + 1
        general |= {"sliding_window_pattern": period, "full_attention_interval": period}
    make = TRANSLATIONS.get(config.get("model_type", ""))
    return general | (make(dict(config) | general) if make else {})


def _renamed_layers(key: str) -> Callable[[Keys], dict[str, Any]]:
    """Return the translation of a list with the kinds of layers."""
    return lambda config: {key: [MAMBA_NAMES.get(kind, kind) for kind in config.get(key) or ()]}


def _minimax_m2(config: Keys) -> dict[str, Any]:
    rotary = config.get("rotary_dim") or int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    return {"rotary_dim": rotary, "shared_intermediate_size": 0}


def _minimax_m3(config: Keys) -> dict[str, Any]:
    """transformers rotates the part that its rotary parameters name, whatever `rotary_dim` says."""
    if not config.get("rope_parameters"):
        return {}
    return {"rotary_dim": int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1.0))}


def _kimi_linear(config: Keys) -> dict[str, Any]:
    """The layers are counted from 1. It has no rotary embedding, so its base does not matter."""
    kinds = config.get("layer_types")
    if not kinds or config.get("linear_attn_config"):
        return {}
    linear = {
        "num_heads": config["linear_num_heads"],
        "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
    }
    first = config["mlp_layer_types"].index("sparse") if "sparse" in config["mlp_layer_types"] else len(kinds)
    return {"linear_attn_config": linear, "rope_theta": 10000.0, "first_k_dense_replace": first}


def _mimo_v2_flash(config: Keys) -> dict[str, Any]:
    """Published files count the window without the token itself, and mlx-lm takes it to be counted."""
    if "hybrid_layer_pattern" in config:
        return {"sliding_window_size": config["sliding_window_size"] + 1}
    return {
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": config["sliding_window"],
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": config["rms_norm_eps"],
    }


def _gemma4(config: Keys) -> dict[str, Any]:
    """The heads of layers with full attention are larger: transformers 5 lists these layers one by one."""
    changed: Mapping[str, Keys] = config.get("per_layer_config") or {}
    special = [keys["head_dim"] for keys in changed.values() if "head_dim" in keys]
    heads: dict[str, Any] = {"global_head_dim": special[0]} if special else {}
    per_layer = {"hidden_size_per_layer_input": 0} if config["model_type"] == "gemma4_unified_text" else {}
    return {name: value for name, value in (heads | per_layer).items() if config.get(name) is None}


def _yarn_of_one(config: Keys) -> dict[str, Any]:
    """A class that always scales its rotary embedding gets a factor of 1, which changes nothing."""
    if config.get("rope_scaling"):
        return {}
    length, ones = config["max_position_embeddings"], [1.0] * (config["qk_rope_head_dim"] // 2)
    scaling = {"factor": 1.0, "original_max_position_embeddings": length, "short_factor": ones, "long_factor": ones}
    return {"rope_scaling": scaling}


def _jamba(config: Keys) -> dict[str, Any]:
    """mlx-lm adds the offset of layers with experts, transformers subtracts it."""
    offset = -config["expert_layer_offset"] % config["expert_layer_period"]
    return {"expert_layer_offset": offset} | _renamed_layers("layers_block_type")(config)


def _exaone4(config: Keys) -> dict[str, Any]:
    """The kinds of layers are a text with a letter for each."""
    letters = {"sliding_attention": "L", "full_attention": "G"}
    if not config.get("layer_types") or isinstance(config.get("sliding_window_pattern"), str):
        return {}
    return {"sliding_window_pattern": "".join(letters[kind] for kind in config["layer_types"])}


TRANSLATIONS: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "apertus": lambda config: {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "deepseek_v2": _yarn_of_one,
    "exaone4": _exaone4,
    "exaone_moe": lambda config: {
        "is_moe_layer": config.get("is_moe_layer") or [kind == "sparse" for kind in config["mlp_layer_types"]]
    },
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "glm_moe_dsa": lambda config: {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "gpt2": lambda config: {"n_ctx": config.get("n_ctx", config["n_positions"])},
    "gpt_bigcode": lambda config: {"n_inner": config.get("n_inner") or 4 * config["n_embd"]},
    "gpt_neox": lambda config: {
        "rotary_emb_base": config.get("rotary_emb_base") or config["rope_theta"],
        "rotary_pct": config.get("rotary_pct") or config["partial_rotary_factor"],
    },
    "granitemoehybrid": lambda config: {
        "position_embedding_type": config.get("position_embedding_type") or "nope",
        **_renamed_layers("layer_types")(config),
    },
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": lambda config: {"block_dim": config["hidden_size"]},
    "longcat_flash": lambda config: {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mamba2": lambda config: {"intermediate_size": config["expand"] * config["hidden_size"]},
    "mimo_v2_flash": _mimo_v2_flash,
    "minicpm3": _yarn_of_one,
    "minimax_m2": _minimax_m2,
    "minimax_m3_vl_text": _minimax_m3,
    # transformers' layers with a state limit the step from below by this key, and not from above.
    "nemotron_h": lambda config: {"time_step_limit": [config.get("time_step_min", 0.0), math.inf]},
    "phixtral": lambda config: {"num_vocab": config.get("num_vocab") or config["vocab_size"]},
    "qwen3_vl_moe_text": lambda config: {"norm_topk_prob": True},
    "solar_open": lambda config: {
        "intermediate_size": config["moe_intermediate_size"],  # of dense layers: it has none
        "first_k_dense_replace": 0,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    },
}

# ----------------------------------------------------------------------------------------------------------------------
# The config completed.

# What transformers' configs hold beside what describes the model.
UNRELATED = {
    "transformers_version", "dtype", "torch_dtype", "architectures", "id2label", "label2id", "_name_or_path",
    "output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "problem_type",
    "is_encoder_decoder",
}  # fmt: skip


def both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with what mlx-lm reads too, in so far as transformers reads the same model from it."""
    meaning, full = _values(config), dict(config) | complete(config, {})
    if meaning is not None and _agrees(_values(full), meaning):
        return full
    result = copy.deepcopy(dict(config))
    for part in ("text_config", None):
        old, new = (table.get(part) or {} if part else table for table in (result, full))
        for key in [key for key in new if key != "text_config" and (key not in old or old[key] != new[key])]:
            before = dict(old)
            old[key] = new[key]
            # A file that only mlx-lm reads is taken literally.
            if key in before if meaning is None else not _agrees(_values(result), meaning):
                old.clear()
                old.update(before)
    return result


def _values(config: Mapping[str, Any]) -> Any:
    """Return all values that transformers reads from a config.json, None if it does not know the model."""
    config_of_transformers = _of_transformers(config)
    return None if config_of_transformers is None else config_of_transformers.to_dict()


def _agrees(actual: Any, expected: Any) -> bool:
    """Return whether all that is expected was found, whatever else was."""
    if not (isinstance(expected, dict) and isinstance(actual, dict)):
        return actual == expected
    all_found, needed = cast("dict[str, Any]", actual), cast("dict[str, Any]", expected)
    return all(key in all_found and _agrees(all_found[key], value) for key, value in needed.items())


def complete(config: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the file lacks, for the model and for its text part. `decided`: keys that win over both."""
    of_transformers = _of_transformers(config)
    keys = _decoded(dict(config)) | _missing_keys(config, of_transformers) | decided
    inner = _table(config, "text_config")
    if inner is not None:
        text = _decoded(inner) | _missing_keys(inner, getattr(of_transformers, "text_config", None))
        if keys.get("tie_word_embeddings") is not None:  # the model as a whole ties, and says so where it is stored
            text["tie_word_embeddings"] = keys["tie_word_embeddings"]
        keys["text_config"] = text | translate(text)
        if "vocab_size" in text:  # some classes take it beside the text part, with a default of their own
            keys.setdefault("vocab_size", text["vocab_size"])
    keys |= translate(keys)
    return {key: value for key, value in keys.items() if key not in config or config[key] != value}


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


def _missing_keys(config: Mapping[str, Any], of_transformers: Any) -> dict[str, Any]:
    """Return the values of transformers' config that are not null and that the file has not, by all their names."""
    missing: dict[str, Any] = {}
    if of_transformers is not None:
        values = {name: value for name, value in of_transformers.to_dict().items() if name not in UNRELATED}
        aliases = cast("dict[str, str]", of_transformers.attribute_map)
        values |= {alias: values.get(name) for alias, name in aliases.items()}
        values["layers_block_type"] = getattr(
            of_transformers, "layers_block_type", None
        )  # a property, so not in `to_dict`
        if "sliding_window_pattern" in config:
            values.pop("layer_types", None)  # which transformers computes from a pattern of its own
        missing = {name: value for name, value in values.items() if value is not None and config.get(name) is None}
    return missing | _rotary(dict(config) | missing)


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `rope_parameters` says, as the single keys of published files."""
    rope = _table(config, "rope_parameters")
    if rope is None:
        return {}
    keys: dict[str, Any] = {}
    sliding = _table(rope, "sliding_attention")
    if sliding is not None and "rope_theta" in sliding:  # one rotary embedding for each kind of layer
        keys |= {"rope_local_base_freq": sliding["rope_theta"], "swa_rope_theta": sliding["rope_theta"]}
    if "full_attention" in rope:
        rope = _table(rope, "full_attention")
    if rope is None:
        return keys
    keys |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaled = rope.get("rope_type", "default") != "default"
    keys["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None
    return {name: value for name, value in keys.items() if config.get(name) is None}


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
        return {key: _decoded(item) for key, item in table.items()}
    return [_decoded(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value
