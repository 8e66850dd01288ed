"""The trained numbers: float32 masters, their gradients and a copy in the compute dtype, each in one flat buffer.

With one buffer, the optimizer step, the gradient norm and the copy each run as one kernel instead of hundreds. Layers
that share an input have their A matrices side by side in it, so that one product computes all of them.

Full fine-tuning has all parameters of the model in the buffer, and no adapter. In float32 it computes with the
masters. In 16 bits it computes with the copy, or with what is trained itself if that is bfloat16
(adapter.master_weights), and the gradient of each parameter is added to the float32 gradient as soon as it is complete,
so that there is never a second gradient of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.model.adapter import Tensors, rank_axis, scaled_ranks, tensor_name
from dualtune.model.beside import is_constant
from dualtune.model.dropout import input_of
from dualtune.model.experts import shapes_apart
from dualtune.model.methods import METHODS
from dualtune.model.optimizer import Shapes
from dualtune_torch.beside import TrainedBeside
from dualtune_torch.methods import AdaptedLayer

Parts = Mapping[str, Shapes]  # by the name of a tensor, those that it consists of


class AdapterBuffer:
    """Flat float32 tensors of one layout, and views of them by the names of the trained tensors, in this order.

    A stack of experts has one view, and is the tensors of its experts for the optimizer and in states
    (`dualtune.model.experts`): these lie in it one after another.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype, *, starts: bool = False,
        masters: torch.dtype = torch.float32, parts: Parts = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`starts`: whether a start is kept beside each A and B. The copy then has both, side by side.

        `masters`: the dtype of what is trained. If that is the compute dtype, there is no copy.

        `parts`: what tensors are for the optimizer and in states that are not one of their own name, as stacks are.
        """
        self.of_base: dict[str, nn.Parameter] = {}  # the parameters of the base that compute with the copy
        self._parts = parts
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            self.shapes |= parts.get(name) or shapes_apart({name: shape})
        size = sum(map(math.prod, self.shapes.values()))
        self.flat = torch.zeros(size, device=device, dtype=masters, requires_grad=True)
        self.flat.grad_dtype = torch.float32
        self.flat.grad = torch.zeros(size, device=device)
        self.masters, self.grads = _views(self.flat.detach(), shapes), _views(self.flat.grad, shapes)
        start_shapes = {name: shape for name, shape in shapes.items() if starts and rank_axis(name)}
        self._start_shapes = shapes_apart(start_shapes)
        self._start = torch.zeros(sum(map(math.prod, start_shapes.values())), device=device)
        self.start = _views(self._start, start_shapes)
        wide = {**shapes, **scaled_ranks(start_shapes, 2, 1)}
        if dtype == masters and not start_shapes:
            self._compute = self.flat.detach()
        else:
            self._compute = torch.empty(sum(map(math.prod, wide.values())), device=device, dtype=dtype)
        self.compute = _views(self._compute, wide)

    def refresh(self) -> None:
        """Update the copy in the compute dtype. Call this after every change of the flat tensor."""
        if self.start:
            parts = {name: self.compute[name].chunk(2, rank_axis(name) or 0) for name in self.start}
            trained = [parts[name][0] if name in parts else self.compute[name] for name in self.masters]
            torch._foreach_copy_(trained, [*self.masters.values()])
            torch._foreach_copy_([parts[name][1] for name in self.start], [*self.start.values()])
        elif self._compute.dtype != self.flat.dtype:
            self._compute.copy_(self.flat.detach())

    def train(self, name: str, parameter: nn.Parameter) -> None:
        """Compute with the tensor of this name in the place of a parameter of the base, which becomes trainable.

        What was loaded is freed. In 16 bits the gradient is added to the float32 one as soon as it is complete.
        """
        self.masters[name].copy_(parameter.detach())
        parameter.data = self.compute[name]
        parameter.requires_grad_(True)
        if self._compute.dtype == torch.float32:
            parameter.grad = self.grads[name]
        else:
            parameter.register_post_accumulate_grad_hook(_add_to(self.grads[name]))
        self.of_base[name] = parameter

    def load(self, trained: Tensors, start: Tensors) -> None:
        fill(self.flat, self.shapes, trained)
        fill(self._start, self._start_shapes, start)

    def state(self) -> tuple[Tensors, Tensors]:
        """Return copies of what is trained, and of the start that is kept."""
        return self.to_numpy(self.flat), to_numpy(self._start, self._start_shapes)

    def to_numpy(self, flat: Tensor) -> Tensors:
        return to_numpy(flat, self.shapes)

    def apart(self, tensors: Tensors) -> Tensors:
        """Return tensors by the names of states: those by the names of parameters are taken apart."""
        parts: Tensors = {}
        for name, tensor in tensors.items():
            shapes = self._parts.get(name, {})
            # A tensor that is its parameter may have a slot of the same size and another shape.
            is_whole = name not in shapes and tensor.size == sum(map(math.prod, shapes.values()))
            parts |= to_numpy(torch.from_numpy(tensor.ravel()), shapes) if shapes and is_whole else {name: tensor}
        return parts


def fill(into: Tensor, shapes: Shapes, state: Tensors) -> None:
    """Write tensors of these shapes into a flat one that consists of them, in this order."""
    for name, view in _views(into.detach(), shapes).items():
        view.copy_(torch.from_numpy(state[name]))


def to_numpy(flat: Tensor, shapes: Shapes) -> Tensors:
    """Return copies of the tensors that a flat one consists of."""
    views = _views(flat.detach().cpu().float(), shapes)
    return {name: views[name].numpy().copy() for name in sorted(views)}


def _views(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    parts = flat.split([*map(math.prod, shapes.values())])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def adapter_buffer(
    layers: Mapping[str, AdaptedLayer],
    device: torch.device,
    dtype: torch.dtype,
    method: str = "lora",
    beside: TrainedBeside | None = None,
    *,
    starts: bool = False,
) -> AdapterBuffer:
    """Make the weights and gradients of adapted layers (by module path), and what is trained beside them, views of a
    new buffer."""
    beside = beside or TrainedBeside()
    together = sorted(layers, key=lambda path: (input_of(path), path))
    weights = {path: layer.trainable() for path, layer in layers.items()}
    named = {
        tensor_name(path, parameter.part, method): weights[path][parameter.part]
        for parameter in METHODS[method].parameters
        for path in together
    }
    named |= beside.rows
    shapes = {name: tuple(weight.shape) for name, weight in {**named, **beside.whole}.items()}
    buffer = AdapterBuffer(shapes, device, dtype, starts=starts)
    if starts:
        for path, layer in layers.items():
            layer.start = (buffer.start[tensor_name(path, "A")], buffer.start[tensor_name(path, "B")])
    for name, weight in named.items():
        weight.data, weight.grad = buffer.masters[name], buffer.grads[name]
    for name, parameter in beside.whole.items():
        buffer.train(name, parameter)
    return buffer


# --- full fine-tuning


def model_buffer(
    model: PreTrainedModel,
    dtype: torch.dtype,
    masters: torch.dtype = torch.float32,
    parts: Parts = MappingProxyType({}),
) -> AdapterBuffer:
    """Move the parameters of a model to a new buffer, make them trainable, and compute with `dtype`.

    Constants (`is_constant`) stay as they are.

    `parts`: the tensors of the files that each parameter consists of, in the order of its memory.
    """
    # An output head that is the embedding counts once.
    parameters = {name: parameter for name, parameter in model.named_parameters() if not is_constant(name)}
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    buffer = AdapterBuffer(shapes, model.device, dtype, masters=masters, parts=parts)
    for name, parameter in parameters.items():
        buffer.train(name, parameter)
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
    """Return copies of the parameters of a freshly loaded model that are trained, float32, by its own names."""
    parameters = sorted(model.named_parameters())
    return {name: np.array(p.detach().float().cpu()) for name, p in parameters if not is_constant(name)}
