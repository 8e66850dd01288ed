"""The torch engine: one model, one adapter, AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualtune.adapter.spec import Tensors, init_adapter
from dualtune.backend import (
    ADAM_BETA1,
    ADAM_BETA2,
    ADAM_EPS,
    FLOAT16_LOSS_SCALE,
    IGNORE_INDEX,
    Batch,
    LoadRequest,
    LossSum,
    OptimizerState,
    StepOutput,
    check_mergeable,
    check_state,
    needs_positions,
)
from dualtune.base_model import copy_without_weights, learned_positions, read_config
from dualtune_torch.adapter import AdapterBuffer
from dualtune_torch.distributed import add_up
from dualtune_torch.frozen import as_stored, compute_dtype, shape_of, weight_of
from dualtune_torch.kernels.attention import Documents
from dualtune_torch.kernels.choose import choose, own_attention
from dualtune_torch.kernels.cross_entropy import LinearCrossEntropy
from dualtune_torch.kernels.lora import add_groups
from dualtune_torch.lora import Noise, add_lora, storage
from dualtune_torch.losses import loss_sum
from dualtune_torch.sharding import check_whole, whole


class TorchEngine:
    """See `dualtune.backend.Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        request: LoadRequest,
        description: Mapping[str, Any],
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`together`: around whatever computes with the model, where its base is split."""
        self.model = model
        self._together = together
        self._request = request
        self._noise = Noise()
        self._num_positions = learned_positions(read_config(request.model_dir))
        self._layers = add_lora(model, request.adapter, self._noise)
        self._adapter = AdapterBuffer(self._layers, model.device, compute_dtype(model))
        self._kernels = choose(model, request.kernels)
        if self._kernels.groups:
            add_groups(self._layers, self._adapter, self._kernels.fuse)
        shapes = {path: shape_of(layer.base) for path, layer in self._layers.items()}
        self.load_adapter_state(init_adapter(shapes, request.adapter.rank, request.seed))
        self._loss_scale = FLOAT16_LOSS_SCALE if description["dtype"] == "float16" else 1.0
        self._loss = torch.zeros((), device=model.device)
        self.description = dict(description) | {
            "adapted_modules": len(self._layers),
            "adapted_weights": storage(self._layers),
            "trainable_parameters": self._adapter.flat.numel(),
            "kernels": str(self._kernels),
        }

    @cached_property
    def _optimizer(self) -> torch.optim.AdamW:
        """Made when first needed: torch has no optimizer over nothing, and a base without adapter is fine to use."""
        optimizer = torch.optim.AdamW(
            [self._adapter.flat],
            betas=(ADAM_BETA1, ADAM_BETA2),
            eps=ADAM_EPS,
            weight_decay=self._request.weight_decay,
            fused=True,
        )
        # As AdamW makes it at the first step; here it may be asked for, or restored, before.
        optimizer.state[self._adapter.flat] = {
            "step": torch.zeros((), device=self._adapter.flat.device),
            "exp_avg": torch.zeros_like(self._adapter.flat),
            "exp_avg_sq": torch.zeros_like(self._adapter.flat),
        }
        return optimizer

    def evaluate(self, batch: Batch) -> LossSum:
        with torch.no_grad(), self._together():
            return LossSum(self._loss_sum(batch), batch.num_targets)

    def forward_backward(self, batch: Batch, *, num_targets: int) -> None:
        self._noise.noise_BT = torch.from_numpy(batch.noise_BT.view(np.int32)).to(self.model.device)
        with self._together():
            loss = self._loss_sum(batch) / num_targets
            if loss.requires_grad:  # else the micro-batch has no target
                (loss * self._loss_scale).backward()
        self._noise.noise_BT = None
        self._loss += loss.detach()

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        flat = self._adapter.flat
        assert flat.grad is not None
        if self._loss_scale != 1.0:
            flat.grad /= self._loss_scale
        add_up([flat.grad, self._loss])
        norm = nn.utils.clip_grad_norm_([flat], math.inf if max_grad_norm is None else max_grad_norm)
        loss, self._loss = self._loss, torch.zeros_like(self._loss)
        self._optimizer.param_groups[0]["lr"] = lr
        # As torch's GradScaler says it: where this is 1, the fused kernels update nothing and the count is taken back.
        found_inf = (~(loss.isfinite() & norm.isfinite())).float()
        self._optimizer.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]  torch declares it nowhere
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        self._adapter.refresh()
        return StepOutput(loss, norm)

    def adapter_state(self) -> Tensors:
        return self._adapter.to_numpy(self._adapter.flat)

    def load_adapter_state(self, state: Tensors) -> None:
        check_state(self._adapter.empty(), state, "adapter")
        self._adapter.load(self._adapter.flat, state)
        self._adapter.refresh()

    def optimizer_state(self) -> OptimizerState:
        state = self._optimizer.state[self._adapter.flat]
        m, v = (self._adapter.to_numpy(state[key]) for key in ("exp_avg", "exp_avg_sq"))
        return OptimizerState(int(state["step"]), m, v)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        check_state(self._adapter.empty(), state.m, "optimizer m")
        check_state(self._adapter.empty(), state.v, "optimizer v")
        into = self._optimizer.state[self._adapter.flat]
        self._adapter.load(into["exp_avg"], state.m)
        self._adapter.load(into["exp_avg_sq"], state.v)
        into["step"].fill_(state.step)

    def logprobs(self, batch: Batch) -> np.ndarray:
        with torch.no_grad(), self._together():
            return _numpy(self._logits(batch).float().log_softmax(-1))

    def generate(self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None]) -> Iterator[int]:
        cache = DynamicCache(config=self.model.config)
        tokens_1T = self._tensor(prompt[None])
        while True:
            with torch.no_grad(), self._together(), own_attention(self.model, self._kernels):
                logits_V = self.model(tokens_1T, past_key_values=cache, use_cache=True).logits[0, -1]
            token = choose(_numpy(logits_V.float()))
            if token is None:
                return
            yield token
            tokens_1T = torch.full_like(tokens_1T[:, :1], token)

    def save_merged(self, path: Path) -> None:
        check_mergeable(self.description)
        check_whole(self.description)
        renamed = {f"{m}.base.{part}": f"{m}.{part}" for m in self._layers for part in ("weight", "bias")}
        weights = {renamed.get(n, n): w for n, w in self.model.state_dict().items() if ".lora_" not in n}
        for module, layer in self._layers.items():
            delta = layer.scale * (layer.lora_B.detach() @ layer.lora_A.detach())
            base = layer.base.weight
            weights[f"{module}.weight"] = (base.float() + as_stored(layer.base, delta)).to(base.dtype)
        for tied in self.model.all_tied_weights_keys:
            weights.pop(tied, None)
        if any(isinstance(module, Conv1D) for module in self.model.modules()):
            # As OpenAI's own files call them, which mlx-lm needs and transformers reads too.
            prefix = f"{self.model.base_model_prefix}."
            weights = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        copy_without_weights(self._request.model_dir, path)
        save_file(
            {n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors", metadata={"format": "pt"}
        )

    def _loss_sum(self, batch: Batch) -> Tensor:
        """Σ −log p(label) over the targets, float32."""
        head = self._kernels.head
        if head is None:
            return loss_sum(self._logits(batch), self._tensor(batch.labels_BT))
        where_M = np.flatnonzero(batch.labels_BT != IGNORE_INDEX)  # on the host: to look on a device is to wait for it
        hidden_BTD = self._run(self.model.base_model, batch).last_hidden_state
        hidden_MD = hidden_BTD.flatten(0, 1)[self._tensor(where_M)]
        labels_M = self._tensor(batch.labels_BT.flat[where_M])
        with whole(head):
            return LinearCrossEntropy.apply(
                hidden_MD, weight_of(head, hidden_MD.dtype), head.bias, labels_M, self._kernels.cap, self._kernels.fuse
            )

    def _logits(self, batch: Batch) -> Tensor:
        return self._run(self.model, batch).logits

    def _run(self, model: nn.Module, batch: Batch) -> Any:
        """transformers' output of a model for the rows of a micro-batch."""
        options: dict[str, Any] = {"use_cache": False}
        if needs_positions(batch, self._num_positions):
            # Without a mask or a cache, transformers takes position ids that do not go up by one for the start of
            # another document, and masks the others (`masking_utils.find_packed_sequence_indices`).
            options["position_ids"] = self._tensor(batch.positions_BT)
        if self._kernels.attention:
            options["documents"] = Documents.of(batch.segments_BT, self.model.device, self._kernels.fuse)
        # Rows are padded on the right and attention is causal, so no real token sees padding and no mask is needed.
        return model(self._tensor(batch.tokens_BT), **options)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.model.device)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()
