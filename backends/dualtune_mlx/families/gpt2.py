"""mlx-lm's GPT-2 for models written by transformers: their tensor names, their config keys, and packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models import gpt2

from dualtune.base.errors import ConfigError

# What mlx-lm's class computes whatever config.json says. The first value is transformers' default.
COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names for one function
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


class Model(gpt2.Model):
    """Reads `transformer.h.0…`, as transformers writes it, and the `h.0…` of OpenAI's own files."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        # Masks in old files, and the output head, which is the embedding.
        unused = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
        bare = {name.removeprefix("transformer."): w for name, w in weights.items() if not name.endswith(unused)}
        return super().sanitize(bare)


class PerTokenEmbedding:
    """A position embedding that also takes one offset per token, for packed rows.

    mlx-lm adds 0, 1, 2, … to the offset of a row. With offsets [B, T], the first of these sums is the token's position.
    """

    def __call__(self, positions: mx.array) -> mx.array:
        return super().__call__(positions[..., 0] if positions.ndim == 3 else positions)  # type: ignore[misc]


def classes(config: Mapping[str, Any]) -> tuple[type[Model], type[gpt2.ModelArgs]]:
    return Model, gpt2.ModelArgs


def check_computed(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for values that mlx-lm ignores."""
    for key, (default, *others) in COMPUTED.items():
        if config.get(key, default) not in (default, *others):
            raise ConfigError(
                f"model.name: {key} is {config[key]} in the config.json of this GPT-2, but mlx-lm always uses "
                f"{default}. Train it with --platform cpu or cuda"
            )
    if config.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise ConfigError(
            f"model.name: n_inner is {config['n_inner']} in the config.json of this GPT-2, but mlx-lm supports only "
            "4 x n_embd. Train it with --platform cpu or cuda"
        )
