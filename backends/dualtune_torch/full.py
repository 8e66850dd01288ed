"""Models that are trained whole: every parameter is one of the trained numbers, and there is no adapter.

In float32 the model computes with the masters. In a 16-bit dtype it computes with the copy, and the gradient of each
parameter is added to the float32 gradient as soon as it is complete, so that no second gradient of the whole model
exists.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.adapter.spec import Tensors
from dualtune.errors import ConfigError
from dualtune_torch.adapter import AdapterBuffer


def check_plain(quantization: str) -> None:
    """Raise ConfigError unless the base has plain weights. A config cannot say so where it leaves the format to it."""
    if quantization != "none":
        raise ConfigError(
            f"adapter.method: got full, but the base is stored quantized ({quantization}), and packed weights cannot "
            "be trained. Use the plain model, or adapter.method: lora"
        )


def own_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the model; an output head that is the embedding counts once."""
    return dict(model.named_parameters())


def move_to_buffer(model: PreTrainedModel, dtype: torch.dtype) -> AdapterBuffer:
    """Move the float32 parameters of a model to a new buffer, make them trainable, and compute with `dtype`."""
    parameters = own_parameters(model)
    buffer = AdapterBuffer({name: tuple(p.shape) for name, p in parameters.items()}, model.device, dtype)
    for name, parameter in parameters.items():
        buffer.masters[name].copy_(parameter.detach())
        parameter.data = buffer.compute[name]  # frees what was loaded
        parameter.requires_grad_(True)
        if dtype == torch.float32:
            parameter.grad = buffer.grads[name]
        else:
            parameter.register_post_accumulate_grad_hook(_add_to(buffer.grads[name]))
    buffer.refresh()
    model.config.dtype = dtype
    return buffer


def _add_to(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:  # the anchor of a recomputed segment is also told of the gradient it has not got
            total.add_(parameter.grad)
            parameter.grad = None

    return add


def values_of(model: PreTrainedModel) -> Tensors:
    """Return copies of the parameters of a freshly loaded model, float32."""
    return {name: np.array(p.detach().float().cpu()) for name, p in sorted(own_parameters(model).items())}
