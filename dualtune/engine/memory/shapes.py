"""The shapes of dense decoder-only transformers, only from config.json: no weights, no framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast


class UnknownShape(Exception):
    """There is no formula for the model. The message says why."""


class Linear(NamedTuple):
    """A linear layer of a block and its input, which decides what is kept for its adapter."""

    out: int
    in_: int
    reads: Literal["before attention", "heads", "before feed-forward", "inner"]


@dataclass(frozen=True, slots=True)
class Decoder:
    """Grouped-query attention and a feed-forward block in every layer, with norms before both, and maybe also after."""

    hidden: int
    inner: int  # of the feed-forward block
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the output head is the embedding
    gated: bool = True  # the feed-forward block is down(act(gate(x)) · up(x)), else down(act(up(x)))
    qk_norm: bool = False  # queries and keys are normalized per head
    layer_norms: int = 2  # norms per layer with the width of the model
    biased: tuple[str, ...] = ()  # linear layers that have a bias, by their path in a block
    is_gpt2: bool = False  # in its names; its norms have a bias, and its activation is several operations
    positions: int = 0  # rows of the position table

    @property
    def width(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def stack(self) -> str:
        """The module path of the layers."""
        return "transformer.h" if self.is_gpt2 else "model.layers"

    def linears(self) -> Mapping[str, Linear]:
        """Return the linear layers of one layer, by their path in it."""
        q, kv, d, inner = self.width, self.kv_width, self.hidden, self.inner
        if self.is_gpt2:
            return {
                "attn.c_attn": Linear(q + 2 * kv, d, "before attention"),
                "attn.c_proj": Linear(d, q, "heads"),
                "mlp.c_fc": Linear(inner, d, "before feed-forward"),
                "mlp.c_proj": Linear(d, inner, "inner"),
            }
        gate = {"mlp.gate_proj": Linear(inner, d, "before feed-forward")} if self.gated else {}
        return {
            "self_attn.q_proj": Linear(q, d, "before attention"),
            "self_attn.k_proj": Linear(kv, d, "before attention"),
            "self_attn.v_proj": Linear(kv, d, "before attention"),
            "self_attn.o_proj": Linear(d, q, "heads"),
            **gate,
            "mlp.up_proj": Linear(inner, d, "before feed-forward"),
            "mlp.down_proj": Linear(d, inner, "inner"),
        }

    @property
    def head(self) -> str:
        """The module path of the output head."""
        return "lm_head"

    @property
    def fused_loss(self) -> bool:
        """Whether the logits are the output head's: they are then never in memory at once."""
        return True

    def places(self) -> dict[str, tuple[int, str]]:
        """Return the number of the layer of each linear layer, and its path in it, by module path."""
        return {f"{self.stack}.{i}.{name}": (i, name) for i in range(self.layers) for name in self.linears()}

    def modules(self) -> dict[str, tuple[int, int]]:
        """Return the linear layers that can be adapted: module path -> (out, in)."""
        linears = self.linears()
        shapes = {path: (linears[name].out, linears[name].in_) for path, (_, name) in self.places().items()}
        return shapes if self.tied else {**shapes, self.head: (self.vocab, self.hidden)}

    @property
    def active_parameters(self) -> int:
        """The weights of all layers that a token is multiplied with."""
        return self.linear_parameters

    @property
    def linear_parameters(self) -> int:
        """The weights of all layers' linear layers, without biases and the output head."""
        return self.layers * sum(layer.out * layer.in_ for layer in self.linears().values())

    @property
    def vector_parameters(self) -> int:
        """Norms and biases."""
        biases = sum(self.linears()[name].out for name in self.biased)
        norm = self.hidden * (2 if self.is_gpt2 else 1)
        norms = self.layer_norms * norm + (2 * self.head_dim if self.qk_norm else 0)
        return self.layers * (norms + biases) + norm

    @property
    def table_parameters(self) -> int:
        """The embedding, the output head if it is a separate matrix, and the position table."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden

    @property
    def num_parameters(self) -> int:
        return self.linear_parameters + self.vector_parameters + self.table_parameters


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

# The keys of config.json. GPT-2's names are the older ones.
LAYERS = ("num_hidden_layers", "n_layer")
HEADS = ("num_attention_heads", "n_head")
HIDDEN = ("hidden_size", "n_embd")
INNER = ("intermediate_size", "n_inner")

# Facts about families that config.json does not contain, by model_type; `tied` is transformers' default if the key is
# missing. A family is listed only after its parameters and activations were compared with the real engines'.
FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt2": {
            "tied": True,
            "gated": False,
            "is_gpt2": True,
            "biased": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        },
        "llama": {"tied": False},
        "mistral": {"tied": False},
        "qwen2": {"tied": False, "biased": QKV},
        "qwen3": {"tied": False, "qk_norm": True},
    }
)


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """Return the shape from config.json. UnknownShape for a model without formulas."""
    nested: Any = config.get("text_config", config)
    if not isinstance(nested, Mapping):
        raise UnknownShape("its text_config is not a mapping")
    config = cast("Mapping[str, Any]", nested)
    decoder, kind = any_decoder(config), str(config.get("model_type"))
    if kind not in FAMILIES:
        raise UnknownShape(f"its model_type is {kind}; there are formulas for {', '.join(sorted(FAMILIES))}")
    family = dict(FAMILIES[kind])
    if kind == "gpt2":
        family |= {
            "positions": _number(config, "n_positions"), "inner": config.get("n_inner") or 4 * decoder.hidden,
            "kv_heads": decoder.heads, "head_dim": decoder.hidden // decoder.heads,
        }  # fmt: skip
    else:
        _number(config, "intermediate_size")  # GPT-2 may omit it, these families must not
    if config.get("attention_bias"):
        family["biased"] = (*QKV, "self_attn.o_proj")
    if config.get("mlp_bias"):
        family["biased"] = (*family.get("biased", ()), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    if "tie_word_embeddings" in config:
        del family["tied"]
    return replace(decoder, **family)


def any_decoder(config: Mapping[str, Any]) -> Decoder:
    """Return the shape of any family, as far as config.json describes it; unknown features are ignored."""
    if any("experts" in key and isinstance(value, int) and value > 1 for key, value in config.items()):
        raise UnknownShape("it is a mixture of experts: a token uses only a few of them")
    for names in (INNER, ("num_key_value_heads",), ("head_dim",)):
        _number(config, *names, default=1)
    layers, heads, hidden, vocab = (_number(config, *names) for names in (LAYERS, HEADS, HIDDEN, ("vocab_size",)))
    return Decoder(
        hidden=hidden,
        inner=next((config[name] for name in INNER if config.get(name)), 4 * hidden),
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the value of the first of these keys in config.json. UnknownShape if it is not a number."""
    value = next((config[name] for name in names if config.get(name)), default)
    if not isinstance(value, int):
        raise UnknownShape(f"its config.json has no {names[0]}, or one for each layer")
    return value


# --- published models -------------------------------------------------------------------------------------------------


def _config(
    kind: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **others: Any
) -> Mapping[str, Any]:
    """A whole config.json: enough to build the model with random weights."""
    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return MappingProxyType(
        {
            "architectures": [f"{classes[kind]}ForCausalLM"],
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
            "vocab_size": vocab,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6 if kind in ("qwen2", "qwen3") else 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | others
    )


_TIED = {"tie_word_embeddings": True}
_SMOLLM2 = _TIED | {"max_position_embeddings": 8192, "rope_theta": 100000.0}
_ROPE3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LLAMA3 = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": _ROPE3,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA32 = _LLAMA3 | _TIED | {"rope_scaling": _ROPE3 | {"factor": 32.0}}
_QWEN = {"max_position_embeddings": 32768, "rope_theta": 1e6, "bos_token_id": 151643, "eos_token_id": 151645}
_QWEN3 = _QWEN | {"max_position_embeddings": 40960, "head_dim": 128}

# By hub id, smallest first; whole configs, so that tests and recommendations can build them. `published` knows more.
KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "HuggingFaceTB/SmolLM2-135M": _config("llama", 576, 1536, 30, 9, 3, 49152, **_SMOLLM2),
        "HuggingFaceTB/SmolLM2-360M": _config("llama", 960, 2560, 32, 15, 5, 49152, **_SMOLLM2),
        "Qwen/Qwen2.5-0.5B-Instruct": _config("qwen2", 896, 4864, 24, 14, 2, 151936, **_QWEN | _TIED),
        "Qwen/Qwen3-0.6B": _config("qwen3", 1024, 3072, 28, 16, 8, 151936, **_QWEN3 | _TIED),
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _config(
            "llama", 2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048
        ),
        "meta-llama/Llama-3.2-1B-Instruct": _config("llama", 2048, 8192, 16, 32, 8, 128256, **_LLAMA32),
        "HuggingFaceTB/SmolLM2-1.7B": _config(
            "llama", 2048, 8192, 24, 32, 32, 49152, **_SMOLLM2 | {"rope_theta": 130000.0}
        ),
        "Qwen/Qwen3-1.7B": _config("qwen3", 2048, 6144, 28, 16, 8, 151936, **_QWEN3 | _TIED),
        "meta-llama/Llama-3.2-3B-Instruct": _config("llama", 3072, 8192, 28, 24, 8, 128256, **_LLAMA32),
        "Qwen/Qwen3-4B": _config("qwen3", 2560, 9728, 36, 32, 8, 151936, **_QWEN3 | _TIED),
        "meta-llama/Llama-2-7b-hf": _config("llama", 4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096),
        "mistralai/Mistral-7B-Instruct-v0.3": _config(
            "mistral", 4096, 14336, 32, 32, 8, 32768, max_position_embeddings=32768, rope_theta=1e6, sliding_window=None
        ),
        "Qwen/Qwen2.5-7B-Instruct": _config("qwen2", 3584, 18944, 28, 28, 4, 152064, **_QWEN),
        "meta-llama/Llama-3.1-8B-Instruct": _config("llama", 4096, 14336, 32, 32, 8, 128256, **_LLAMA3),
        "Qwen/Qwen3-8B": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, **_QWEN3),
        "Qwen/Qwen3-14B": _config("qwen3", 5120, 17408, 40, 40, 8, 151936, **_QWEN3),
        "Qwen/Qwen3-32B": _config("qwen3", 5120, 25600, 64, 64, 8, 151936, **_QWEN3),
        "meta-llama/Llama-3.3-70B-Instruct": _config("llama", 8192, 28672, 80, 64, 8, 128256, **_LLAMA3),
    }
)


def published(name: str) -> Mapping[str, Any] | None:
    """Return the facts of a published model's config.json, by its hub id; None: it is not in the tables.

    The second table, published.json, has the shapes alone (scripts/published_shapes.py). A copy below `unsloth/` under
    the same name has the same shape.
    """
    if name in KNOWN:
        return KNOWN[name]
    table = _published()
    owner, _, short = name.partition("/")
    if owner == "unsloth":
        name = next((listed for listed in (*KNOWN, *table) if listed.partition("/")[2] == short), name)
    return KNOWN.get(name) or table.get(name)


@cache
def _published() -> Mapping[str, Mapping[str, Any]]:
    table = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    keys = table["columns"][1:-2]  # between the name and where it comes from
    return {row[0]: dict(zip(keys, row[1:-2], strict=True)) for row in table["models"]}
