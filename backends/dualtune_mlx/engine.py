"""The MLX engine: one model, one adapter, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from dualtune.adapter.spec import Tensors, init_adapter, tensor_name
from dualtune.backend import (
    FLOAT16_LOSS_SCALE,
    Batch,
    LoadRequest,
    LossSum,
    OptimizerState,
    StepOutput,
    check_mergeable,
    check_state,
)
from dualtune.base_model import copy_without_weights
from dualtune_mlx.lora import Noise, add_lora, linear_shape
from dualtune_mlx.losses import loss_sum
from dualtune_mlx.model import check_names
from dualtune_mlx.optimizer import Arrays, adamw, clip
from dualtune_mlx.packing import packed_cache


class MlxEngine:
    """See `dualtune.backend.Engine`. MLX is lazy: each verb that changes state asks for its evaluation."""

    def __init__(self, model: nn.Module, request: LoadRequest, description: Mapping[str, Any]) -> None:
        self.model = model
        self._request = request
        self._noise = Noise()
        self._layers = add_lora(model, request.adapter, self._noise)
        if request.init == "pretrained":
            check_names(request.model_dir, list(self._layers))
        shapes = {path: linear_shape(layer.base) for path, layer in self._layers.items()}
        fresh = init_adapter(shapes, request.adapter.rank, request.seed)
        self._params: Arrays = {n: mx.array(w) for n, w in fresh.items()}
        self._bind(self._params)
        self._m, self._v = _zeros(self._params), _zeros(self._params)
        self._step = mx.array(0.0)  # on the device, because the device decides whether a step counts
        self._grads = _zeros(self._params)
        self._loss = mx.array(0.0)
        self._loss_scale = FLOAT16_LOSS_SCALE if description["dtype"] == "float16" else 1.0
        self._loss_and_grad = mx.value_and_grad(self._scaled_loss)
        self.description = dict(description) | {
            "adapted_modules": len(self._layers),
            "trainable_parameters": sum(p.size for p in self._params.values()),
        }

    def evaluate(self, batch: Batch) -> LossSum:
        loss = loss_sum(self._logits(batch), mx.array(batch.labels_BT))
        return LossSum(loss.item(), batch.num_targets)

    def forward_backward(self, batch: Batch, *, num_targets: int) -> None:
        self._noise.noise_BT = mx.array(batch.noise_BT)
        loss, grads = self._loss_and_grad(self._params, batch, num_targets)
        self._bind(self._params)  # the function above left its own arguments bound
        self._noise.noise_BT = None
        self._grads = {n: self._grads[n] + g for n, g in grads.items()}
        self._loss = self._loss + loss / self._loss_scale
        mx.async_eval(self._grads, self._loss)

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        if self._loss_scale != 1.0:
            self._grads = {n: g / self._loss_scale for n, g in self._grads.items()}
        grads, norm = clip(self._grads, max_grad_norm)
        loss, self._loss = self._loss, mx.array(0.0)
        old = (self._params, self._m, self._v)
        new = adamw(*old, grads, step=self._step + 1, lr=lr, decay=self._request.weight_decay)
        good = mx.isfinite(loss) & mx.isfinite(norm)
        self._params, self._m, self._v = (_where(good, n, o) for n, o in zip(new, old, strict=True))
        self._step = self._step + good
        self._bind(self._params)
        self._grads = _zeros(self._params)
        mx.async_eval(self._params, self._m, self._v, self._step, self._grads, loss, norm)
        return StepOutput(loss, norm)

    def adapter_state(self) -> Tensors:
        return _to_numpy(self._params)

    def load_adapter_state(self, state: Tensors) -> None:
        check_state(self.adapter_state(), state, "adapter")
        self._params = {n: mx.array(state[n]) for n in self._params}
        self._bind(self._params)

    def optimizer_state(self) -> OptimizerState:
        return OptimizerState(int(self._step.item()), _to_numpy(self._m), _to_numpy(self._v))

    def load_optimizer_state(self, state: OptimizerState) -> None:
        shapes = self.adapter_state()
        check_state(shapes, state.m, "optimizer m")
        check_state(shapes, state.v, "optimizer v")
        self._step = mx.array(float(state.step))
        self._m = {n: mx.array(state.m[n]) for n in self._params}
        self._v = {n: mx.array(state.v[n]) for n in self._params}

    def logprobs(self, batch: Batch) -> np.ndarray:
        logits_BTV = self._logits(batch).astype(mx.float32)
        return np.array(logits_BTV - mx.logsumexp(logits_BTV, axis=-1, keepdims=True))

    def generate(self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None]) -> Iterator[int]:
        cache = make_prompt_cache(self.model)
        tokens_1T = mx.array(prompt[None].astype(np.int32))
        while True:
            logits_V = self.model(tokens_1T, cache=cache)[0, -1].astype(mx.float32)
            token = choose(np.array(logits_V))
            if token is None:
                return
            yield token
            tokens_1T = mx.array([[token]])

    def save_merged(self, path: Path) -> None:
        check_mergeable(self.description)
        renamed = {f"{m}.base.{part}": f"{m}.{part}" for m in self._layers for part in ("weight", "bias")}
        weights = {renamed.get(n, n): w for n, w in tree_flatten(self.model.parameters())}
        for module, layer in self._layers.items():
            delta = layer.scale * (layer.weights.lora_B_Or @ layer.weights.lora_A_rI)
            base = layer.base.weight
            weights[f"{module}.weight"] = (base.astype(mx.float32) + delta).astype(base.dtype)
        copy_without_weights(self._request.model_dir, path)
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})

    def _scaled_loss(self, params: Arrays, batch: Batch, num_targets: int) -> mx.array:
        self._bind(params)
        return loss_sum(self._logits(batch), mx.array(batch.labels_BT)) * (self._loss_scale / num_targets)

    def _logits(self, batch: Batch) -> mx.array:
        if batch.segments_BT.max() > 1:
            return self.model(mx.array(batch.tokens_BT), cache=packed_cache(self.model, batch))
        # Rows are padded on the right and attention is causal, so no real token sees padding and no mask is needed.
        return self.model(mx.array(batch.tokens_BT))

    def _bind(self, params: Arrays) -> None:
        for path, layer in self._layers.items():
            layer.weights.lora_A_rI = params[tensor_name(path, "A")]
            layer.weights.lora_B_Or = params[tensor_name(path, "B")]


def _zeros(like: Arrays) -> Arrays:
    return {n: mx.zeros(a.shape) for n, a in like.items()}


def _where(condition: mx.array, yes: Arrays, no: Arrays) -> Arrays:
    return {n: mx.where(condition, yes[n], no[n]) for n in yes}


def _to_numpy(arrays: Arrays) -> Tensors:
    return {n: np.array(a) for n, a in arrays.items()}
