"""What the routers of a mixture choose, and the gradient that evens it out (`dualtune.engine.routing`) on torch.

transformers' routers return (logits, weights of the chosen experts, their numbers); DBRX's the logits alone, and
JetMoe's, of which attention has one too, what its code needs of the choice. The gradient is added at the logits while
the weights' own passes, so that neither a second forward pass nor an output of the model is needed, and a layer that is
recomputed does it once, where its backward pass is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, SupportsFloat, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune.engine.routing import KEY, DocumentShares, experts_of_token, routing_metrics
from dualtune_torch.host.inputs import to_device
from dualtune_torch.weights.frozen import shape_of


class _Form(NamedTuple):
    """Where a router's output has what is needed of it; None: the output is that, or has it not."""

    logits: int | None = 0
    weights: int | None = 1  # what the gradient may reach the logits through
    chosen: int | None = 2  # None: the largest logits'


FORMS = {"DbrxRouter": _Form(None, None, None), "JetMoeTopKGating": _Form(4, 2, None)}
# Where transformers finds the logits in an output, if not first. JetMoe's attention has once more those of its router.
RECORDED = {"JetMoeTopKGating": 4, "Ernie4_5_VLMoeMoeBlock": 1}


class Routing:
    """Watches the routers of a model in the micro-batches of a step."""

    def __init__(
        self, model: PreTrainedModel, config: Mapping[str, Any], coefficient: float, loss_scale: float
    ) -> None:
        """`loss_scale`: by which all gradients are multiplied. ConfigError for a model without such routers."""
        self._each = experts_of_token(config, coefficient)
        self._coefficient, self._loss_scale, self._device = coefficient, loss_scale, model.device
        routers = find_routers(model)
        self._num_layers = len(routers)
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._note, number))
        self._documents: tuple[Tensor, ...] | None = None  # of the micro-batch; None: nothing is watched
        # Of the step: how many tokens each expert gets, and the loss.
        self._counts_LE = torch.zeros(self._num_layers, _num_experts(routers[0]), device=model.device)
        self._loss = torch.zeros((), device=model.device)

    @contextmanager
    def watching(self, shares: DocumentShares) -> Iterator[None]:
        """Count what routers choose, and add their gradient, in the forward and backward pass inside the block."""
        self._documents = tuple(to_device(shares, self._device))
        try:
            yield
        finally:
            self._documents = None

    def sums(self) -> list[Tensor]:
        """Return what has been added up since the last step, to be added up over all processes in place."""
        return [self._loss, self._counts_LE]

    def metrics(self) -> dict[str, SupportsFloat]:
        """Return the metrics of the step, on the device, and begin the next one."""
        busiest = (self._counts_LE.amax(-1) / self._counts_LE.sum(-1).clamp(min=1)).max()
        metrics = routing_metrics(self._loss.clone(), busiest, (self._counts_LE == 0).sum())
        self.forget()
        return metrics

    def forget(self) -> None:
        """Forget what has been added up."""
        self._counts_LE.zero_()
        self._loss.zero_()

    def _note(self, number: int, router: nn.Module, args: Any, output: Any) -> Any:
        # Layers that are recomputed run without gradients first, and evaluations always.
        if self._documents is None or not torch.is_grad_enabled():
            return None
        form = FORMS.get(type(router).__name__, _Form())
        logits, weights = (output if place is None else output[place] for place in form[:2])
        first_N, size_N, share_N, token_M, document_M = self._documents
        with torch.no_grad():
            probs_NE = logits.flatten(0, -2).float().softmax(-1)
            chosen = probs_NE.topk(self._each).indices if form.chosen is None else output[form.chosen]
            chosen_Nk = chosen.reshape(len(probs_NE), -1)
            chosen_NE = torch.zeros_like(probs_NE).scatter_(-1, chosen_Nk, 1.0) * (size_N > 0).unsqueeze(-1)
            counts_NE = torch.zeros_like(probs_NE).index_add_(0, first_N, chosen_NE)
            counts_NE.index_add_(0, document_M, chosen_NE[token_M])
            self._counts_LE[number] += counts_NE.sum(0)
            own_NE = counts_NE[first_N] * (share_N / size_N.clamp(min=1)).unsqueeze(-1)
            loads_NE = own_NE.index_add(0, token_M, own_NE[document_M])
            overlap_N1 = (probs_NE * loads_NE).sum(-1, keepdim=True)
            scale = probs_NE.shape[-1] / self._num_layers
            self._loss += scale * overlap_N1.sum()
            if not self._coefficient or not logits.requires_grad:
                return None
            slopes_NE = self._coefficient * self._loss_scale * scale * probs_NE * (loads_NE - overlap_N1)
        slopes = slopes_NE.to(logits.dtype).view_as(logits)
        changed = _WithSlopes.apply(weights, logits, slopes)
        if form.weights is None:
            return changed
        return (*output[: form.weights], changed, *output[form.weights + 1 :])


class _WithSlopes(torch.autograd.Function):
    """The weights of the chosen experts as they are. The backward pass adds the slopes at the logits."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return slope, ctx.saved_tensors[0], None


def find_routers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules whose output has the logits that transformers records as those of routers, layer by layer."""
    classes = tuple({kind for part in model.modules() for kind in _recorded(part)})
    routers = [module for module in model.modules() if classes and isinstance(module, classes)]
    # ERNIE 4.5 VL records them of a block, which has a router for text and another one for images.
    routers = [cast(Any, router).text_moe.gate if hasattr(router, "text_moe") else router for router in routers]
    if not routers:
        raise ConfigError(f"{KEY}: transformers names no routers of {type(model).__name__}; allowed: null")
    return routers


def _recorded(module: nn.Module) -> Iterator[type[nn.Module]]:
    """Yield the classes that a model records the logits of routers of."""
    outputs = cast("Mapping[str, Any]", getattr(module, "_can_record_outputs", None) or {})
    logits = outputs.get("router_logits")
    recorders: list[Any] = logits if isinstance(logits, list) else [logits]
    for recorder in recorders:
        kind = getattr(recorder, "target_class", None)
        if kind and recorder.index == RECORDED.get(kind.__name__, 0):
            yield kind


def _num_experts(router: Any) -> int:
    layer = getattr(router, "layer", router)  # of DBRX and JetMoe
    return shape_of(getattr(layer, "base", layer))[0]
