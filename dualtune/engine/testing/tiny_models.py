"""Tiny models with random weights, written with NumPy only, and batches for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from dualtune.engine.backend import IGNORE_INDEX, Batch

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_llama(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a Llama in Hugging Face layout with random float32 weights. `changes` replace keys of LLAMA_CONFIG.

    With model_type qwen3 it also has the norms of queries and keys that a Qwen3 has.
    """
    config = LLAMA_CONFIG | changes
    d, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm.weight": (d,), f"{layer}.post_attention_layernorm.weight": (d,)}
        projections = {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
                       "self_attn.o_proj": (d, q), "mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d),
                       "mlp.down_proj": (d, ff)}  # fmt: skip
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in projections.items()}
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
    rng = np.random.default_rng(seed)
    weights = {
        name: (rng.normal(0, 1, shape) / np.sqrt(shape[-1]) if len(shape) == 2 else 1 + 0.1 * rng.normal(0, 1, shape))
        for name, shape in shapes.items()
    }
    return _write(path, config, weights)


GPT2_CONFIG: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
    "vocab_size": 96,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_gpt2(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a GPT-2 with random float32 weights and OpenAI's names. `changes` replace keys of GPT2_CONFIG."""
    config = GPT2_CONFIG | changes
    config["n_ctx"] = config["n_positions"]  # only mlx-lm reads it
    d, rng = config["n_embd"], np.random.default_rng(seed)
    linear = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}
    weights = {"wte.weight": rng.normal(0, 0.3, (config["vocab_size"], d)),
               "wpe.weight": rng.normal(0, 0.3, (config["n_positions"], d))}  # fmt: skip
    norms = ["ln_f"]
    for i in range(config["n_layer"]):
        norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
        for name, (in_dim, out_dim) in linear.items():
            weights[f"h.{i}.{name}.weight"] = rng.normal(0, 1, (in_dim, out_dim)) / np.sqrt(in_dim)
            weights[f"h.{i}.{name}.bias"] = rng.normal(0, 0.1, out_dim)
    for norm in norms:
        weights |= {f"{norm}.weight": 1 + 0.1 * rng.normal(0, 1, d), f"{norm}.bias": rng.normal(0, 0.1, d)}
    return _write(path, config, weights)


def write_softmax_model(path: Path, seed: int = 0, vocab: int = 31, hidden: int = 8) -> Path:
    """Write the model of `numpy_engine`: logits = head · tanh(mixer · embedding). `mixer` is square."""
    rng = np.random.default_rng(seed)
    shapes = {"embedding": (vocab, hidden), "mixer": (hidden, hidden), "head": (vocab, hidden)}
    weights = {f"{name}.weight": rng.normal(0, 1, shape) for name, shape in shapes.items()}
    return _write(path, {"model_type": "dualtune-softmax"}, weights)


def _write(path: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({n: w.astype(np.float32) for n, w in weights.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def random_batch(lengths: Sequence[int], vocab: int, *, seed: int = 0, pad: int = 0, prompt: int = 2) -> Batch:
    """Return rows of the given lengths with random tokens, padded by `pad` more columns than needed.

    The first `prompt` tokens of each row are not targets. A row of the same length and position has the same tokens,
    whatever the padding.
    """
    shape = (len(lengths), max(lengths) + pad)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    labels, seeds = np.full(shape, IGNORE_INDEX, np.int32), np.zeros(shape, np.uint32)
    for b, n in enumerate(lengths):
        rng = np.random.default_rng([seed, b])
        row = rng.integers(3, vocab, n)
        tokens[b, :n], segments[b, :n], positions[b, :n] = row, 1, np.arange(n)
        labels[b, prompt - 1 : n - 1] = row[prompt:]
        seeds[b, :n] = rng.integers(0, 1 << 32, n, np.uint32)
    return Batch(tokens, labels, segments, positions, seeds)


def pack(batch: Batch, rows: Sequence[Sequence[int]], *, pad: int = 0) -> Batch:
    """Pack the documents of a batch that has one per row. `rows`: for each new row, the rows of `batch` to take."""
    lengths = np.count_nonzero(batch.segments_BT, axis=1)
    shape = (len(rows), max(sum(lengths[row]) for row in rows) + pad)
    packed = Batch(
        np.zeros(shape, np.int32), np.full(shape, IGNORE_INDEX, np.int32), np.zeros(shape, np.int32),
        np.zeros(shape, np.int32), np.zeros(shape, np.uint32),
        None if batch.weights_BT is None else np.zeros(shape, np.float32),
        None if (hidden := batch.hidden_BTD) is None else np.zeros((*shape, hidden.shape[-1]), hidden.dtype),
    )  # fmt: skip
    for b, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row, start=1):
            target, source = (b, slice(start, start + lengths[document])), (document, slice(lengths[document]))
            for name, values in _arrays(batch).items():
                getattr(packed, name)[target] = values[source]
            packed.segments_BT[target] = number
            start += lengths[document]
    return packed


def with_common_beginning(
    lengths: Sequence[int], vocab: int, shared: int, *, seed: int = 0, pad: int = 0
) -> tuple[Batch, Batch]:
    """Return documents that begin with the same tokens: this beginning once, all in one row; and in rows of their own.

    The beginning has `shared` tokens without a target, and the same dropout in all.
    """
    apart = random_batch(lengths, vocab, seed=seed, prompt=shared + 1)
    apart.tokens_BT[:, :shared], apart.dropout_seeds_BT[:, :shared] = (
        array[0, :shared] for array in (apart.tokens_BT, apart.dropout_seeds_BT)
    )
    packed = pack(apart, [range(len(lengths))], pad=pad)
    keep = (packed.segments_BT[0] <= 1) | (packed.positions_BT[0] >= shared)
    once = replace(packed, **{name: array[:, keep] for name, array in _arrays(packed).items()})
    return replace(once, parents_BT=(once.segments_BT > 1).astype(np.int32)), apart


def with_other_padding(batch: Batch) -> Batch:
    """Return the batch with other token ids in its padding, and one more row that is only padding."""
    empty = np.zeros_like(batch.tokens_BT[:1])
    return Batch(
        np.concatenate([np.where(batch.segments_BT == 0, 5, batch.tokens_BT), empty + 4]),
        np.concatenate([batch.labels_BT, empty + IGNORE_INDEX]),
        np.concatenate([batch.segments_BT, empty]),
        np.concatenate([batch.positions_BT, empty]),
        np.concatenate([batch.dropout_seeds_BT, empty.astype(np.uint32)]),
        None if batch.weights_BT is None else np.concatenate([batch.weights_BT, empty.astype(np.float32)]),
        None if (hidden := batch.hidden_BTD) is None else np.concatenate([hidden, np.zeros_like(hidden[:1])]),
    )


def row_of(batch: Batch, b: int) -> Batch:
    """Return one row of a batch, as a batch."""
    return replace(batch, **{name: values[b : b + 1] for name, values in _arrays(batch).items()}, documents=())


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Return the arrays of a batch by name; without weights if it has none."""
    arrays = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return {name: values for name, values in arrays.items() if isinstance(values, np.ndarray)}
