"""Independent forward passes in NumPy float64, to compare engines with. They share no code with any engine.

Legend: B rows, T tokens, D hidden, H heads, K key/value heads, d head size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.model.adapter import Tensors, tensor_name

Oracle = Callable[[Batch, Tensors, float], np.ndarray]  # (batch, adapter, scale) -> log p, float64 [B, T, V]


def loss_of(logprobs_BTV: np.ndarray, batch: Batch) -> float:
    """Return −Σ w·log p(label) over the targets."""
    logprobs_BT, weights_BT = target_logprobs_of(logprobs_BTV, batch), batch.target_weights_BT
    return float(-(logprobs_BT if weights_BT is None else weights_BT * logprobs_BT).sum())


def target_logprobs_of(logprobs_BTV: np.ndarray, batch: Batch) -> np.ndarray:
    """Return log p(label), of the shape of the labels, 0 where there is no target."""
    is_target = batch.labels_BT != IGNORE_INDEX
    labels_BTK = np.where(is_target, batch.labels_BT, 0).reshape(*batch.tokens_BT.shape, -1)
    return np.where(is_target, np.take_along_axis(logprobs_BTV, labels_BTK, -1).reshape(is_target.shape), 0.0)


def softmax_oracle(path: Path, rows: Sequence[int] = ()) -> Oracle:
    """Return the oracle for the model of `numpy_engine`, which merges the adapter into the weights.

    `rows`: the token ids of trained rows.
    """
    weights = _load(path)

    def logprobs(batch: Batch, adapter: Tensors, scale: float) -> np.ndarray:
        w = _merged(weights, adapter, scale, rows)
        h = np.tanh(w["embedding.weight"][batch.tokens_BT] @ w["mixer.weight"].T)
        return _log_softmax(h @ w["head.weight"].T)

    return logprobs


def llama_oracle(path: Path, rows: Sequence[int] = ()) -> Oracle:
    """Return the oracle for Llama as in Hugging Face transformers.

    With rotate-half RoPE, grouped-query attention, SwiGLU and RMSNorm. A token attends only to its own document, and in
    a layer of type `sliding_attention` only to the last `sliding_window` tokens of it. `rows`: the token ids of trained
    rows.
    """
    config = json.loads((path / "config.json").read_text())
    weights = _load(path)
    theta = float(config["rope_theta"])
    heads, kv_heads, size = (int(config[k]) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight

    def rope(x_BHTd: np.ndarray, positions_BT: np.ndarray) -> np.ndarray:
        angles_BT = positions_BT[..., None] * np.array([theta ** (-i / size) for i in range(0, size, 2)])
        cos, sin = np.cos(angles_BT)[:, None], np.sin(angles_BT)[:, None]
        a, b = np.split(x_BHTd, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def seen(batch: Batch, layer_type: str) -> np.ndarray:
        """Return the attention mask, bool [B, T, T]: True where a token (row) attends to another (column)."""
        T = batch.tokens_BT.shape[1]
        window = config["sliding_window"] if layer_type == "sliding_attention" else T
        same_document = batch.segments_BT[:, :, None] == batch.segments_BT[:, None, :]
        own = same_document & np.tri(T, dtype=bool)
        if batch.parents_BT is not None:  # of its parent, a document sees what lies before its own first position
            positions_BT1 = np.where(own, batch.positions_BT[:, None, :], T).min(-1, keepdims=True)
            is_parent = batch.segments_BT[:, None, :] == np.where(batch.parents_BT, batch.parents_BT, -1)[..., None]
            own |= is_parent & (batch.positions_BT[:, None, :] < positions_BT1)
        return own & (batch.positions_BT[..., None] - batch.positions_BT[:, None, :] < window)

    def attention(
        x_BTD: np.ndarray, w: Tensors, layer: str, positions_BT: np.ndarray, seen_BTT: np.ndarray
    ) -> np.ndarray:
        B, T, _ = x_BTD.shape

        def project(name: str, n: int) -> np.ndarray:
            return (x_BTD @ w[f"{layer}.self_attn.{name}.weight"].T).reshape(B, T, n, size).transpose(0, 2, 1, 3)

        q, k, v = project("q_proj", heads), project("k_proj", kv_heads), project("v_proj", kv_heads)
        q, k = rope(q, positions_BT), rope(k, positions_BT)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.where(seen_BTT[:, None], q @ k.swapaxes(-1, -2) / np.sqrt(size), -np.inf)
        mixed = np.exp(_log_softmax(scores)) @ v
        return mixed.transpose(0, 2, 1, 3).reshape(B, T, heads * size) @ w[f"{layer}.self_attn.o_proj.weight"].T

    def mlp(x: np.ndarray, w: Tensors, layer: str) -> np.ndarray:
        gate, up = x @ w[f"{layer}.mlp.gate_proj.weight"].T, x @ w[f"{layer}.mlp.up_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T

    # The adapter is merged into the weights: a second path, so that no engine's code of adapters is repeated here.
    def logprobs(batch: Batch, adapter: Tensors, scale: float) -> np.ndarray:
        w = _merged(weights, adapter, scale, rows)
        x = w["model.embed_tokens.weight"][batch.tokens_BT]
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            normed = norm(x, w[f"{layer}.input_layernorm.weight"])
            x = x + attention(normed, w, layer, batch.positions_BT, seen(batch, layer_types[i]))
            x = x + mlp(norm(x, w[f"{layer}.post_attention_layernorm.weight"]), w, layer)
        head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
        return _log_softmax(norm(x, w["model.norm.weight"]) @ head.T)

    return logprobs


def _load(path: Path) -> Tensors:
    return {n: w.astype(np.float64) for n, w in load_file(path / "model.safetensors").items()}


def _merged(weights: Tensors, adapter: Tensors, scale: float, rows: Sequence[int]) -> Tensors:
    """Merge an adapter of LoRA, or of DoRA, which also has the lengths of rows; and what is trained beside it."""
    merged = dict(weights)
    for name in weights:
        module = name.removesuffix(".weight")
        a, b, m = (adapter.get(tensor_name(module, part, "dora")) for part in ("A", "B", "m"))
        if a is not None and b is not None:
            merged[name] = weights[name] + scale * (b.astype(np.float64) @ a.astype(np.float64))
        if m is not None:
            merged[name] *= m[:, None] / np.linalg.norm(merged[name], axis=1, keepdims=True)
        if (whole := adapter.get(f"base_model.model.{name}")) is not None:
            merged[name] = whole.astype(np.float64)
        own = adapter.get(f"base_model.model.{module}.token_adapter.trainable_tokens_delta")
        if own is not None:
            merged[name] = weights[name].copy()
            merged[name][[*rows]] = own
    return merged


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
