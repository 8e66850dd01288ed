"""Modules of mlx-lm that compute something else than transformers does, corrected before the weights are loaded.

Legend: B rows, T tokens, D hidden size, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.dbrx import SparseMoeBlock
from mlx_lm.models.ernie4_5_moe import Ernie4_5_MoeMLP
from mlx_lm.models.jamba import JambaSparseMoeBlock
from mlx_lm.models.rope_utils import YarnRoPE

from dualtune.base.errors import ConfigError
from dualtune_mlx.kernels.compiled import replace_name


def _glm(model: Any, config: Mapping[str, Any]) -> None:
    """mlx-lm rotates whole heads (`glm.py`: `dims=self.head_dim`), transformers the part that the config names."""
    for layer in model.layers:
        layer.self_attn.rope.dims = int(layer.self_attn.head_dim * config.get("partial_rotary_factor", 1.0))


class CorrectedRouter(Ernie4_5_MoeMLP):
    """mlx-lm drops the correction of the router's choice (`ernie4_5_moe.py`: `remove_patterns`)."""

    correction: mx.array

    def __call__(self, x_BTD: mx.array) -> mx.array:
        scores_BTE = mx.softmax(self.gate(x_BTD).astype(mx.float32), axis=-1)
        ranked_BTE = mx.argpartition(-(scores_BTE + self.correction), kth=self.k - 1, axis=-1)
        chosen_BTk = mx.stop_gradient(ranked_BTE[..., : self.k])
        weights_BTk = mx.take_along_axis(scores_BTE, chosen_BTk, axis=-1)
        weights_BTk = weights_BTk / mx.maximum(weights_BTk.sum(axis=-1, keepdims=True), 1e-12)
        y_BTkD = self.switch_mlp(x_BTD, chosen_BTk)
        y_BTD = (y_BTkD * weights_BTk[..., None].astype(y_BTkD.dtype)).sum(axis=-2)
        return y_BTD if self.shared_experts is None else y_BTD + self.shared_experts(x_BTD)


def _ernie4_5_moe(model: Any, config: Mapping[str, Any]) -> None:
    for layer in model.layers:
        if isinstance(layer.mlp, Ernie4_5_MoeMLP):
            layer.mlp.__class__ = CorrectedRouter
            layer.mlp.correction = mx.zeros(config["moe_num_experts"])


class AllExperts(SparseMoeBlock):
    """mlx-lm computes token by token (`dbrx.py`), by numbers that it reads back: too slow, and it cannot be compiled.

    Here every expert computes every token, and those that were not chosen have the weight 0.
    """

    def __call__(self, x_BTD: mx.array) -> mx.array:
        scores_BTE = mx.softmax(self.router(x_BTD).astype(mx.float32), axis=-1)
        k = self.num_experts_per_tok
        chosen_BTk = mx.stop_gradient(mx.argpartition(-scores_BTE, kth=k - 1, axis=-1)[..., :k])
        is_chosen_BTE = (chosen_BTk[..., None] == mx.arange(self.num_experts)).any(axis=-2)
        weights_BTE = mx.where(is_chosen_BTE, scores_BTE, 0.0)
        weights_BTE = (weights_BTE / weights_BTE.sum(axis=-1, keepdims=True)).astype(x_BTD.dtype)
        outputs = [expert(x_BTD) * weights_BTE[..., e, None] for e, expert in enumerate(self.experts)]
        return mx.stack(outputs).sum(axis=0)


def _dbrx(model: Any, config: Mapping[str, Any]) -> None:
    for module in model.modules():
        if type(module) is SparseMoeBlock:
            module.__class__ = AllExperts


class AllGates(JambaSparseMoeBlock):
    """mlx-lm weighs the chosen experts among themselves (`jamba.py`), transformers among all."""

    def __call__(self, x_BTD: mx.array) -> mx.array:
        scores_BTE = mx.softmax(self.router(x_BTD).astype(mx.float32), axis=-1)
        k = self.num_experts_per_tok
        chosen_BTk = mx.stop_gradient(mx.argpartition(-scores_BTE, kth=k - 1, axis=-1)[..., :k])
        weights_BTk = mx.take_along_axis(scores_BTE, chosen_BTk, axis=-1).astype(x_BTD.dtype)
        return (self.switch_mlp(x_BTD, chosen_BTk) * weights_BTk[..., None]).sum(axis=-2)


def _jamba(model: Any, config: Mapping[str, Any]) -> None:
    for layer in model.layers:
        if isinstance(layer.feed_forward, JambaSparseMoeBlock):
            layer.feed_forward.__class__ = AllGates


class NormedRotary(nn.Module):
    """mlx-lm normalizes rotated heads with a constant (`llama4.py`: eps=1e-6), transformers with the config's."""

    def __init__(self, rope: nn.Module, eps: float) -> None:
        super().__init__()
        self.rope, self.eps = rope, eps

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        rotate: Any = self.rope
        return mx.fast.rms_norm(rotate(x, offset=offset), None, self.eps)


def _llama4(model: Any, config: Mapping[str, Any]) -> None:
    for layer in model.layers:
        if layer.self_attn.use_qk_norm:
            layer.self_attn.use_qk_norm = False
            layer.self_attn.rope = NormedRotary(layer.self_attn.rope, layer.args.rms_norm_eps)


LATENT_EPS = 1e-6  # of transformers' LongcatFlashRMSNorm


def _longcat_flash(model: Any, config: Mapping[str, Any]) -> None:
    """mlx-lm norms the latent states with its own default (`longcat_flash.py`: 1e-5), transformers with its own."""
    for layer in model.layers:
        for attention in layer.self_attn:
            for norm in (attention.kv_a_layernorm, getattr(attention, "q_a_layernorm", None)):
                if norm is not None:
                    norm.eps = LATENT_EPS


# --- activations: mlx-lm has one for all models of a family, transformers that of the config --------------------------

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh", "gelu_accurate")  # names of one function
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu, **dict.fromkeys(_TANH, nn.gelu_approx), "relu": nn.relu, "silu": nn.silu,
}  # fmt: skip


MLP = Callable[[Any, mx.array], mx.array]


def _gated(mlp: Any, x: mx.array) -> mx.array:
    return mlp.down_proj(mlp.act(mlp.gate_proj(x)) * mlp.up_proj(x))


def _plain(mlp: Any, x: mx.array) -> mx.array:
    return mlp.c_proj(mlp.act(mlp.c_fc(x)))


def _of_neox(mlp: Any, x: mx.array) -> mx.array:
    return mlp.dense_4h_to_h(mlp.act(mlp.dense_h_to_4h(x)))


def _activate(model: nn.Module, call: MLP, key: str, name: Any) -> None:
    """Let the MLPs of a model compute `call` with the activation that `key` of its config names."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"model.name: {key} of config.json is {name!r}; on mlx this family computes {', '.join(ACTIVATIONS)}. "
            "Train it with --platform cpu or cuda"
        )
    for module in model.modules():
        if type(module).__name__ == "MLP":
            mlp: Any = module
            mlp.__class__ = type("MLP", (type(module),), {"__call__": call, "__module__": type(module).__module__})
            mlp.act = ACTIVATIONS[name]


def _gemma(model: nn.Module, config: Mapping[str, Any]) -> None:
    """`gelu`, in the first files that Google published, means the approximation (transformers' GemmaConfig)."""
    name = config.get("hidden_act", "gelu_pytorch_tanh")
    _activate(model, _gated, "hidden_act", "gelu_pytorch_tanh" if name == "gelu" else name)


def _gpt_bigcode(model: nn.Module, config: Mapping[str, Any]) -> None:
    _activate(model, _plain, "activation_function", config.get("activation_function", "gelu_pytorch_tanh"))


def _gpt_neox(model: nn.Module, config: Mapping[str, Any]) -> None:
    _activate(model, _of_neox, "hidden_act", config.get("hidden_act", "gelu"))


def _starcoder2(model: nn.Module, config: Mapping[str, Any]) -> None:
    _activate(model, _plain, "hidden_act", config.get("hidden_act", "gelu_pytorch_tanh"))


NANOCHAT_EPS = 1e-6  # of transformers' NanoChatConfig


def _nanochat_norm(x: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, None, NANOCHAT_EPS)


def _nanochat(model: nn.Module, config: Mapping[str, Any]) -> None:
    """mlx-lm's norms are a function with a constant (`nanochat.py`: 1e-5): here it is transformers'."""
    if (eps := config.get("rms_norm_eps", NANOCHAT_EPS)) != NANOCHAT_EPS:
        raise ConfigError(
            f"model.name: rms_norm_eps of config.json is {eps:g}; on mlx a NanoChat has {NANOCHAT_EPS:g}. Train it "
            "with --platform cpu or cuda"
        )
    replace_name(model, "rms_norm", lambda _: _nanochat_norm)


def _phi3small(model: Any, config: Mapping[str, Any]) -> None:
    raise ConfigError(
        "model.name: mlx-lm computes wrong numbers for a Phi-3 small (phi3small.py: layers with sparse attention add "
        "their causal mask, of true and false, to the scores), and no other program here has a class for it"
    )


def correct_frequencies(model: nn.Module, config: Mapping[str, Any]) -> None:
    """mlx-lm's YaRN begins and ends its ramp at whole dimensions, also where the config has `truncate: false`."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("truncate", True):
        return
    for module in model.modules():
        if isinstance(module, YarnRoPE):
            module._freqs = _yarn(module.dims, config["rope_theta"], scaling)


def _yarn(dims: int, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """Return the period of each pair of dimensions (Peng et al., YaRN, arXiv 2309.00071), not truncated."""

    def dimension(turns: float) -> float:
        """Return the dimension that turns this often over the length that the model was first trained on."""
        return (
            dims * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))
        )

    low = max(dimension(scaling.get("beta_fast") or 32), 0)
    high = min(dimension(scaling.get("beta_slow") or 1), dims - 1)
    slowed = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    periods = base ** (mx.arange(0, dims, 2) / dims)
    return 1 / ((1 - slowed) / periods + slowed / (scaling["factor"] * periods))


def _minicpm3(model: Any, config: Mapping[str, Any]) -> None:
    if config.get("tie_word_embeddings"):
        raise ConfigError(
            "model.name: mlx-lm computes wrong logits for a MiniCPM3 with a tied output head (minicpm3.py: the head is "
            "not scaled by dim_model_base). Train it with --platform cpu or cuda"
        )


Correction = Callable[[nn.Module, Mapping[str, Any]], None]
CORRECTIONS: dict[str, Correction] = {
    "dbrx": _dbrx,
    "ernie4_5_moe": _ernie4_5_moe,
    "gemma": _gemma,
    "glm": _glm,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "jamba": _jamba,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "longcat_flash": _longcat_flash,
    "minicpm3": _minicpm3,
    "nanochat": _nanochat,
    "phi3small": _phi3small,
    "starcoder2": _starcoder2,
}
