"""Tiny models of the layouts that only mlx-lm has: no class of transformers writes or checks them.

The config is made from the class's own arguments, and the weights have mlx-lm's names, as models converted by it do.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from family.make import MAX_PARAMETERS, CannotMake, write_tokenizer
from family.shrink import shrink

REQUIRED: dict[str, Any] = {  # arguments without a default whose value is no size
    "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4, "num_transformer_layers": 4, "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "rope_theta": 1e4, "attention_bias": False,
    "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1, "routed_scaling_factor": 1.0,
    "n_kv_heads": 2, "hidden_dim": 64, "num_kv_reuse_layers": 2, "sliding_window_layers": [1, 3], "conv_window": 2,
    "layer_group_size": 2, "group_norm_size": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
    "use_cla": True, "cla_share_factor": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "dim_model_base": 64,
    "scale_depth": 1.4, "scale_emb": 12.0, "model_dim": 64, "ffn_dim_divisor": 8, "num_query_heads": [4] * 4,
    "num_kv_heads": [2] * 4, "ffn_multipliers": [1.0] * 4, "dense_attention_every_n_layers": 2, "gegelu_limit": 20.0,
    "ff_intermediate_size": 96, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
    "decay_low_rank_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


def is_known_to_transformers(family: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return family in {*CONFIG_MAPPING_NAMES, *(name.replace("-", "_") for name in CONFIG_MAPPING_NAMES)}


def mlx_only_names() -> list[str]:
    """Return the model types of mlx-lm that transformers does not have, as its files are called."""
    import mlx_lm.models

    files = sorted(Path(next(iter(mlx_lm.models.__path__))).glob("*.py"))
    return [file.stem for file in files if not is_known_to_transformers(file.stem) and _has_model(file)]


def _has_model(file: Path) -> bool:
    text = file.read_text(encoding="utf-8")
    return "class ModelArgs" in text and "class Model(" in text


def make_mlx_only(family: str, directory: Path) -> int:
    """Write the model with a tokenizer to a directory. Return its number of parameters."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = _config(module.ModelArgs) | {"model_type": family, "vocab_size": 320}
    if "num_vocab" in config:
        config["num_vocab"] = config["vocab_size"]
    try:
        model = module.Model(module.ModelArgs.from_dict(config))
        size = sum(w.size for _, w in tree_flatten(model.parameters()))
        if size > MAX_PARAMETERS:
            raise CannotMake(f"size: {size:,} parameters are no tiny model")
        mx.random.seed(0)
        weights = [(name, _random(name, w)) for name, w in tree_flatten(model.parameters())]
        model.update(tree_unflatten(weights))
        mx.eval(model(mx.array([[5, 6, 7, 8, 9]])))
    except CannotMake:
        raise
    except Exception as error:
        raise CannotMake(f"mlx-lm: {type(error).__name__}: {error}") from error
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(directory / "model.safetensors"), dict(weights), {"format": "mlx"})
    write_tokenizer(directory)
    return size


def _config(kind: Any) -> dict[str, Any]:
    """Return a class's arguments made small; those without a default are of REQUIRED, or sizes."""
    config: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        if each.default is not dataclasses.MISSING:
            config[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            config[each.name] = each.default_factory()
        elif each.name != "model_type":
            config[each.name] = REQUIRED.get(each.name, 1024)
    return shrink(config) | {
        name: REQUIRED[name] for name in config.keys() & REQUIRED.keys() if _is_required(kind, name)
    }


def _is_required(kind: Any, name: str) -> bool:
    return inspect.signature(kind).parameters[name].default is inspect.Parameter.empty


def _random(name: str, weight: Any) -> Any:
    import mlx.core as mx

    if weight.ndim >= 2:
        return mx.random.normal(weight.shape) * weight.shape[-1] ** -0.5
    return weight if name.endswith(("A_log", "dt_bias")) else weight + 0.1 * mx.random.normal(weight.shape)
