"""The backward pass of a LoRA layer as a function on tensors, by the backend whose tensors they are."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, cast

from dualtune.engine.backend import get_backend
from dualtune.engine.card import cards


class LoRABackward(Protocol):
    """A backend that has the function. It is optional: the training loop does not need it."""

    def lora_backward(
        self, grad_out: Any, x: Any, lora_down: Any, lora_up: Any, scale: float, *, need_grad_x: bool, require_gpu: bool
    ) -> tuple[Any, ...]: ...


def lora_backward(
    grad_out: Any,
    x: Any,
    lora_down: Any,
    lora_up: Any,
    scale: float,
    *,
    need_grad_x: bool = False,
    require_gpu: bool = False,
) -> tuple[Any, ...]:
    """Return (grad_down, grad_up), and with `need_grad_x` also grad_x, of y = scale · (x lora_downᵀ) lora_upᵀ.

    x [tokens, K] or [B, T, K]; grad_out likewise with N; lora_down [r, K]; lora_up [N, r]; float64, float32, bfloat16
    or float16, x and grad_out of the same dtype. Strides are free. A gradient has shape and dtype of its argument, is a
    new tensor and belongs to no graph: add it to `.grad`, or return it from a `torch.autograd.Function`.

    Raises ValueError with the name of an argument whose shape, dtype or device does not fit, TypeError for tensors that
    no backend computes with, and with `require_gpu` EnvironmentFault for tensors that are not on an NVIDIA GPU.
    """
    return _backend_for(grad_out.__class__).lora_backward(
        grad_out, x, lora_down, lora_up, scale, need_grad_x=need_grad_x, require_gpu=require_gpu
    )


@cache
def _backend_for(kind: type[Any]) -> LoRABackward:
    """Return the backend whose framework defines a class of tensors."""
    framework = kind.__module__.partition(".")[0]
    for card in cards():
        if card.package.framework == framework:
            backend = get_backend(card.name, "cpu")  # only selects; the function computes where its tensors are
            if hasattr(backend, "lora_backward"):
                return cast(LoRABackward, backend)
    raise TypeError(
        f"lora_backward: grad_out: got {kind.__module__}.{kind.__qualname__}, allowed: tensors of a framework whose "
        "backend has this function"
    )
