"""The torch engine: one model, one adapter, AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from dualtune.adapter.spec import Tensors, init_adapter, tensor_name
from dualtune.backend import (
    ADAM_BETA1,
    ADAM_BETA2,
    ADAM_EPS,
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
from dualtune_torch.lora import Noise, add_lora
from dualtune_torch.losses import loss_sum


class TorchEngine:
    """See `dualtune.backend.Engine`."""

    def __init__(self, model: PreTrainedModel, request: LoadRequest, description: Mapping[str, Any]) -> None:
        self.model = model
        self._request = request
        self._noise = Noise()
        self._layers = add_lora(model, request.adapter, self._noise)
        self._params = {
            tensor_name(path, part): getattr(layer, f"lora_{part}")
            for path, layer in self._layers.items()
            for part in ("A", "B")
        }
        shapes = {path: (layer.base.out_features, layer.base.in_features) for path, layer in self._layers.items()}
        self.load_adapter_state(init_adapter(shapes, request.adapter.rank, request.seed))
        self._loss_scale = FLOAT16_LOSS_SCALE if description["dtype"] == "float16" else 1.0
        self._loss = torch.zeros((), device=model.device)
        self.description = dict(description) | {
            "adapted_modules": len(self._layers),
            "trainable_parameters": sum(p.numel() for p in self._params.values()),
        }

    @cached_property
    def _optimizer(self) -> torch.optim.AdamW:
        """Made when first needed: torch has no optimizer over nothing, and a base without adapter is fine to use."""
        return torch.optim.AdamW(
            self._params.values(),
            betas=(ADAM_BETA1, ADAM_BETA2),
            eps=ADAM_EPS,
            weight_decay=self._request.weight_decay,
            fused=True,
        )

    def evaluate(self, batch: Batch) -> LossSum:
        with torch.no_grad():
            loss = loss_sum(self._logits(batch), self._tensor(batch.labels_BT))
        return LossSum(float(loss), batch.num_targets)

    def forward_backward(self, batch: Batch, *, num_targets: int) -> None:
        self._noise.noise_BT = torch.from_numpy(batch.noise_BT.view(np.int32)).to(self.model.device)
        loss = loss_sum(self._logits(batch), self._tensor(batch.labels_BT)) / num_targets
        (loss * self._loss_scale).backward()
        self._noise.noise_BT = None
        self._loss += loss.detach()

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        params = list(self._params.values())
        if self._loss_scale != 1.0:
            for p in params:
                p.grad /= self._loss_scale
        norm = nn.utils.clip_grad_norm_(params, math.inf if max_grad_norm is None else max_grad_norm)
        loss, self._loss = self._loss, torch.zeros_like(self._loss)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # As torch's GradScaler says it: where this is 1, the fused kernels update nothing and the count is taken back.
        self._optimizer.found_inf = (~(loss.isfinite() & norm.isfinite())).float()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepOutput(loss, norm)

    def adapter_state(self) -> Tensors:
        return {name: _numpy(p) for name, p in self._params.items()}

    def load_adapter_state(self, state: Tensors) -> None:
        check_state({n: np.empty(p.shape) for n, p in self._params.items()}, state, "adapter")
        _copy(self._params, state)

    def optimizer_state(self) -> OptimizerState:
        self._init_moments()
        moments = {n: self._optimizer.state[p] for n, p in self._params.items()}
        step = int(next(iter(moments.values()))["step"])
        m, v = ({n: _numpy(s[key]) for n, s in moments.items()} for key in ("exp_avg", "exp_avg_sq"))
        return OptimizerState(step, m, v)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        shapes = {n: np.empty(p.shape) for n, p in self._params.items()}
        check_state(shapes, state.m, "optimizer m")
        check_state(shapes, state.v, "optimizer v")
        self._init_moments()
        moments = {n: self._optimizer.state[p] for n, p in self._params.items()}
        _copy({n: s["exp_avg"] for n, s in moments.items()}, state.m)
        _copy({n: s["exp_avg_sq"] for n, s in moments.items()}, state.v)
        for s in moments.values():
            s["step"].fill_(state.step)

    def logprobs(self, batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return _numpy(self._logits(batch).float().log_softmax(-1))

    def generate(self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None]) -> Iterator[int]:
        cache = DynamicCache(config=self.model.config)
        tokens_1T = self._tensor(prompt[None])
        while True:
            with torch.no_grad():
                logits_V = self.model(tokens_1T, past_key_values=cache, use_cache=True).logits[0, -1]
            token = choose(_numpy(logits_V.float()))
            if token is None:
                return
            yield token
            tokens_1T = torch.full_like(tokens_1T[:, :1], token)

    def save_merged(self, path: Path) -> None:
        check_mergeable(self.description)
        renamed = {f"{m}.base.{part}": f"{m}.{part}" for m in self._layers for part in ("weight", "bias")}
        weights = {renamed.get(n, n): w for n, w in self.model.state_dict().items() if ".lora_" not in n}
        for module, layer in self._layers.items():
            delta = layer.scale * (layer.lora_B.detach() @ layer.lora_A.detach())
            weights[f"{module}.weight"] = (layer.base.weight.float() + delta).to(layer.base.weight.dtype)
        for tied in self.model.all_tied_weights_keys:
            weights.pop(tied, None)
        copy_without_weights(self._request.model_dir, path)
        save_file(
            {n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors", metadata={"format": "pt"}
        )

    def _logits(self, batch: Batch) -> Tensor:
        tokens_BT = self._tensor(batch.tokens_BT)
        if batch.segments_BT.max() > 1:
            # Without a mask or a cache, transformers takes position ids that do not go up by one for the start of
            # another document, and masks the others (`masking_utils.find_packed_sequence_indices`).
            return self.model(tokens_BT, position_ids=self._tensor(batch.positions_BT), use_cache=False).logits
        # Rows are padded on the right and attention is causal, so no real token sees padding and no mask is needed.
        return self.model(tokens_BT, use_cache=False).logits

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.model.device)

    def _init_moments(self) -> None:
        """AdamW makes its state at the first step; here it may be asked for, or restored, before."""
        for p in self._params.values():
            if not self._optimizer.state[p]:
                self._optimizer.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


def _copy(into: Mapping[str, Tensor], state: Tensors) -> None:
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(torch.from_numpy(state[name]))
