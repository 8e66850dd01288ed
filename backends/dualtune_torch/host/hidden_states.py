"""Hidden states that come from the host, in place of the layers below the lowest adapter.

While a micro-batch has them, the first layers pass on what they get, and the last layer below the adapters returns the
given ones. The model's own loop, its embedding, positions and masks stay as they are, so no model needs code of its
own; what leaves the embedding is computed for nothing, which is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.engine.backend import num_layers_below, returns_more_than_states
from dualtune_torch.checkpointing import decoder_layers
from dualtune_torch.host.inputs import to_device


class FrozenLayers:
    """The layers of a model below its lowest adapted module."""

    def __init__(self, model: PreTrainedModel, adapted: Collection[nn.Module]) -> None:
        """There are none if anything but a layer or the output head is adapted, or transformers lists no layers."""
        layers = list((decoder_layers(model) or nn.ModuleList())._modules.values())
        modules = (layer.modules() for layer in layers if layer is not None)
        self._layers: list[Any] = layers[: num_layers_below(modules, adapted, model.get_output_embeddings())]
        self._above: list[Any] = layers[len(self._layers) :]
        self._device = model.device

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def replaced(self, hidden_BTD: np.ndarray | None) -> Iterator[None]:
        """Use these hidden states inside the block, in forward passes and in what a backward pass recomputes."""
        if hidden_BTD is None:
            yield
            return
        hidden = _to_device(hidden_BTD, self._device)
        with _passing(self._layers):
            self._layers[-1].forward = lambda hidden_states, *args, **options: hidden
            yield

    def computed(self, run: Callable[[], object]) -> np.ndarray:
        """Return the hidden states that leave the last of these layers while `run` runs the model."""
        outputs: list[Any] = []
        hook = self._layers[-1].register_forward_hook(lambda layer, args, output: outputs.append(output))
        try:
            with _passing(self._above):  # nobody needs what they would compute
                run()
        finally:
            hook.remove()
        if len(outputs) != 1 or not isinstance(outputs[0], Tensor):
            raise returns_more_than_states(type(self._layers[-1]).__name__)
        return _to_numpy(outputs[0])


@contextmanager
def _passing(layers: Collection[Any]) -> Iterator[None]:
    """Let these layers return what they get, inside the block."""
    try:
        for layer in layers:
            layer.forward = _same
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _same(hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    return hidden_states


def _to_numpy(x: Tensor) -> np.ndarray:
    """Return the numbers; bfloat16, which NumPy does not have, as its bits in uint16."""
    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    is_bfloat16 = array.dtype == np.uint16
    (tensor,) = to_device([array.view(np.int16) if is_bfloat16 else array], device)
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor
