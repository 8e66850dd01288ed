"""Activation checkpointing: segments of decoder layers that keep only their input and run again in the backward pass.

transformers' loop over its layers stays as it is. Only the class of their ModuleList changes, so that a loop gets a
`_Runner` for each layer of a segment; names, states and the hooks of a sharded base stay. A runner returns its input
until the segment is complete, and the last one runs all its layers as one autograd function.

Chen et al., Training deep nets with sublinear memory cost, arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dualtune.base.errors import ConfigError
from dualtune.engine.card import ActivationCheckpointing
from dualtune.model.targets import is_text
from dualtune_torch.adapter_inputs import KEY, recompute_inputs
from dualtune_torch.host.transfers import HostInputs
from dualtune_torch.kernels.lora import LoRAGroup
from dualtune_torch.sharding import class_of


class Recomputation:
    """What of a model is recomputed in the backward pass."""

    def __init__(self, model: PreTrainedModel, groups: Sequence[LoRAGroup]) -> None:
        self._model, self._groups = model, groups
        self._layers = decoder_layers(model)
        self._segments: Sequence[range] = ()
        self._host: HostInputs | None = None  # where the inputs of segments wait; None: on the device
        self._keep_inputs: Callable[[], object] | None = None  # ends the recomputation of the adapters' inputs

    def set(self, checkpointing: ActivationCheckpointing, trial: Callable[[], object]) -> str:
        """Recompute this from the next forward pass on, and return a description. `trial` runs the model once.

        ConfigError if it is impossible; then nothing changes.
        """
        if self._layers is None and checkpointing.layers:
            raise ConfigError(
                f"{KEY}: got {checkpointing.layers} layers, but transformers does not list the layers of "
                f"{type(self._model).__name__}; allowed: none, adapter_inputs"
            )
        num_layers = len(self._layers or ())
        segments = checkpointing.segments(num_layers)
        if checkpointing.adapter_inputs and self._keep_inputs is None:
            self._install(())  # the trial looks at what layers keep
            try:
                self._keep_inputs = recompute_inputs(self._model, self._groups, trial)
            finally:
                self._install(self._segments)
        elif self._keep_inputs is not None and not checkpointing.adapter_inputs:
            self._keep_inputs()
            self._keep_inputs = None
        self._segments = segments
        self._host = (self._host or HostInputs(self._model.device)) if checkpointing.offload else None
        self._install(segments)
        return checkpointing.describe(num_layers)

    def _install(self, segments: Sequence[range]) -> None:
        if self._layers is not None:
            self._layers.__class__ = SegmentedLayers if segments else nn.ModuleList
            self._layers.__dict__.update(segments=segments, host=self._host)


class SegmentedLayers(nn.ModuleList):
    """The layers of a model, some of which are recomputed in the backward pass."""

    segments: Sequence[range] = ()
    host: HostInputs | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._in_segments(range(len(self))))

    def __getitem__(self, index: Any) -> Any:
        """Return a layer, or a list of layers. A single one is recomputed alone."""
        if isinstance(index, slice):
            return self._in_segments(range(len(self))[index])
        return self._in_segments([range(len(self))[index]])[0]

    def _in_segments(self, indices: Sequence[int]) -> list[Any]:
        """Return these layers, those of a segment as runners. What runners wait for does not outlive their loop."""
        layers = list(self._modules.values())
        chosen: list[Any] = [layers[i] for i in indices]
        if not torch.is_grad_enabled():
            return chosen
        for segment in self.segments:
            places = [place for place, i in enumerate(indices) if i in segment]
            together = _Segment([chosen[place] for place in places], self.host)
            for place in places:
                chosen[place] = _Runner(chosen[place], together)
        return chosen


class _Segment:
    """Layers that run one after another, and what each was called with in this forward pass."""

    def __init__(self, layers: Sequence[nn.Module], host: HostInputs | None) -> None:
        self._layers, self._host = layers, host
        self._calls: list[Callable[[Tensor], Tensor]] = []
        self._passed: Tensor | None = None

    def call(self, layer: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return x, or the output of the segment if this is its last layer."""
        self._check(layer, x, (*args, *kwargs.values()))
        self._calls.append(lambda x: layer(x, *args, **kwargs))
        self._passed = x
        if layer is not self._layers[-1]:
            return x
        anchor = _anchor(self._layers)
        if anchor is None and not x.requires_grad:  # nothing here is kept anyway
            return self._run(x)
        return _Recomputed.apply(x, anchor, self._run, self._host)

    def _run(self, x: Tensor) -> Tensor:
        for call in self._calls:
            x = call(x)
        return x

    def _check(self, layer: nn.Module, x: Tensor, others: tuple[Any, ...]) -> None:
        """Raise ConfigError for a model in which more than the hidden states passes from layer to layer."""
        name = class_of(layer).__name__
        if self._calls and x is not self._passed:
            raise ConfigError(
                f"{KEY}: several layers cannot be recomputed at once, because the model computes between its layers "
                f"({name}); allowed: every: 1, or none"
            )
        parts = [part for other in others for part in (other if isinstance(other, tuple) else (other,))]
        if any(isinstance(part, dict | list) or (isinstance(part, Tensor) and part.requires_grad) for part in parts):
            raise ConfigError(
                f"{KEY}: the layers of this model ({name}) exchange more than the hidden states, so they cannot be "
                "recomputed; allowed: none, adapter_inputs"
            )


class _Runner:
    """A layer as the model's loop sees it."""

    def __init__(self, layer: nn.Module, segment: _Segment) -> None:
        self._layer, self._segment = layer, segment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._segment.call(self._layer, hidden_states, args, kwargs)


class _Recomputed(torch.autograd.Function):
    """run(x), which keeps only x, on the device or on the host.

    The anchor is trainable: without one, autograd would skip the function.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, run: Callable[[Tensor], Tensor], host: HostInputs | None
    ) -> Tensor:
        ctx.run = run
        ctx.offloaded = host.put(x) if host else None
        ctx.save_for_backward(None if host else x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x if ctx.offloaded is None else ctx.offloaded.take()
        with torch.enable_grad():
            x = x.detach().requires_grad_(ctx.needs_input_grad[0])
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return x.grad, None, None, None


def _anchor(layers: Sequence[nn.Module]) -> Tensor | None:
    """Return any trainable parameter of these layers."""
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    return next((parameter for parameter in parameters if parameter.requires_grad), None)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the list of the decoder layers, whose class transformers names in `_no_split_modules`.

    In families where it names none, they are those that transformers can recompute.
    """
    names = set(model._no_split_modules or ())

    def is_layer(module: nn.Module) -> bool:
        kind = class_of(module)
        return kind.__name__ in names if names else issubclass(kind, GradientCheckpointingLayer)

    lists = [m for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and (names or is_text(path))]
    stacks = [stack for stack in lists if stack._modules and all(map(is_layer, stack.children()))]
    return stacks[0] if len(stacks) == 1 else None
