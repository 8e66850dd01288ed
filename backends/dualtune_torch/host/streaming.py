"""Layer streaming: the frozen matrices of the decoder layers wait in host memory, and are on the device for a while.

The device has a number of slots, each as large as the largest layer. They hold the layer that computes and the next
ones in the direction of travel, which is up in the forward pass and down in the backward pass, so that the layers at
either end are still there when it turns. A layer's tensors are views of its slot, or else of the host's copy. Whatever
calls a layer brings it to the device: the forward pass, its recomputation in the backward pass, evaluation, generation.

The backward pass of a layer follows its recomputation at once, so every layer has to be recomputed alone, except the
last one, whose backward pass follows its forward pass. All else stays on the device: adapters, norms, embedding, head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune.engine.card import ActivationCheckpointing
from dualtune_torch.checkpointing import decoder_layers
from dualtune_torch.host.transfers import Ticket, Transfers, flat_size, views
from dualtune_torch.weights.by_module import Finish
from dualtune_torch.weights.packed import PackedLayer

KEY = "memory.resident_layers"


class StreamedLayers:
    """The decoder layers of a model, only some of them on the device at a time."""

    def __init__(self, model: PreTrainedModel, device: torch.device, num_slots: int) -> None:
        """Keep the layers on the host and move everything else to the device. ConfigError if the model has fewer."""
        modules = list(_layers_of(model, num_slots))
        self._layers = [_HostCopy(module, device) for module in modules]
        streamed = {id(tensor) for layer in self._layers for tensor in layer.tensors}
        for tensor in _all_tensors(model):
            if id(tensor) not in streamed and tensor.device != device:
                tensor.data = tensor.data.to(device)
        size = max(layer.num_bytes for layer in self._layers)
        self.transfers = Transfers(device)
        self._slots = [_Slot(size, device, self.transfers.computed()) for _ in range(num_slots)]
        self._at: dict[int, _Slot] = {}  # where layers are; the one used last is at the end
        self._current = 0
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._before, number))

    def describe(self) -> Mapping[str, int]:
        return {
            "layers": len(self._layers),
            "resident_layers": len(self._slots),
            "resident_bytes": sum(slot.buffer.nbytes for slot in self._slots),
            "host_bytes": sum(layer.num_bytes for layer in self._layers),
        }

    def check(self, checkpointing: ActivationCheckpointing) -> None:
        """Raise ConfigError unless the backward pass recomputes each layer alone."""
        recomputed = checkpointing.num_recomputed(len(self._layers))
        if recomputed < len(self._layers) - 1 or checkpointing.every > 1:
            raise ConfigError(
                f"memory.checkpointing: got {checkpointing.describe(len(self._layers))}, but with "
                f"{KEY}={len(self._slots)} every layer has to be recomputed by itself; allowed: auto, full"
            )

    def bring(self, part: nn.Module) -> None:
        """Bring the layer that has this part to the device, so that its weights can be read there."""
        for number, layer in enumerate(self._layers):
            if any(module is part for module in layer.module.modules()):
                self._use(number)

    def release(self) -> None:
        """Take all layers from the device: their tensors are then those of the host."""
        for number in list(self._at):
            self._take_from(number)

    def _before(self, number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._use(number)

    def _use(self, number: int) -> None:
        """Bind the layer to its slot, and let the next ones come while it computes."""
        if self._current in self._at:
            self._at[self._current].read = self.transfers.computed()
        step = -1 if 0 < number == self._current - 1 else 1
        ahead = range(number, number + step * len(self._slots), step)
        needed = [i for i in ahead if 0 <= i < len(self._layers)]
        for i in needed:
            if i not in self._at:
                self._fetch(i, needed)
        slot = self._at.pop(number)
        self.transfers.wait(slot.written)
        self._layers[number].bind_to(slot.buffer)
        self._at[number], self._current = slot, number

    def _fetch(self, number: int, needed: Sequence[int]) -> None:
        """Start to copy a layer to the device, in place of the one whose use is longest ago."""
        if len(self._at) == len(self._slots):
            self._take_from(next(resident for resident in self._at if resident not in needed))
        slot = next(slot for slot in self._slots if slot not in self._at.values())
        slot.written = self.transfers.copy(self._layers[number].copies_to(slot.buffer), after=slot.read)
        self._at[number] = slot

    def _take_from(self, number: int) -> None:
        del self._at[number]
        self._layers[number].bind_to_host()


def kept_on_host(finish: Finish, model: PreTrainedModel) -> Finish:
    """Return `finish` for a model that is loaded module by module: what is in a decoder layer goes to the host."""
    layers = decoder_layers(model)
    stack = next((f"{path}." for path, module in model.named_modules() if module is layers), None)

    def finish_(path: str, module: nn.Module) -> nn.Module:
        finished = finish(path, module)
        return finished.to("cpu") if stack and path.startswith(stack) else finished

    return finish_


class _Slot:
    """Device memory for a layer."""

    def __init__(self, size: int, device: torch.device, read: Ticket) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.read = read  # the computation that needs what is there now
        self.written: Ticket = None


class _HostCopy:
    """The frozen matrices of a layer on the host: in one pinned buffer, or as they were loaded if the device is a CPU.

    Plain weights can then stay mapped from their file.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.tensors = list(_frozen_matrices(module))
        self.num_bytes = flat_size(self.tensors)
        self._flat = _pinned(self.num_bytes, device)
        self._host = [tensor.data for tensor in self.tensors]
        if self._flat is not None:
            self._host = views(self._flat, self._host)
            for copy, tensor in zip(self._host, self.tensors, strict=True):
                copy.copy_(tensor.data)
            self.bind_to_host()  # frees the tensors as they were loaded

    def copies_to(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what to copy to have the layer in this buffer, as (to, from)."""
        if self._flat is not None:
            return [(buffer[: self.num_bytes], self._flat)]
        return list(zip(views(buffer, self._host), self._host, strict=True))

    def bind_to(self, buffer: Tensor) -> None:
        self._bind(views(buffer, self._host))

    def bind_to_host(self) -> None:
        self._bind(self._host)

    def _bind(self, places: Sequence[Tensor]) -> None:
        for tensor, place in zip(self.tensors, places, strict=True):
            tensor.data = place


def _pinned(num_bytes: int, device: torch.device) -> Tensor | None:
    """Return a host buffer from which a device copies by itself; None on a CPU. torch rounds it to a power of two."""
    return None if device.type == "cpu" else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _layers_of(model: PreTrainedModel, num_slots: int) -> Iterable[nn.Module]:
    layers = decoder_layers(model)
    if layers is None:
        raise ConfigError(
            f"{KEY}: got {num_slots}, but transformers does not list the layers of {type(model).__name__}; allowed: all"
        )
    if num_slots > len(layers._modules):
        raise ConfigError(
            f"{KEY}: got {num_slots}, but the model has {len(layers._modules)} layers; allowed: 1 to "
            f"{len(layers._modules)}, or all"
        )
    if not all(list(_frozen_matrices(layer)) for layer in layers.children()):
        raise ConfigError(f"{KEY}: got {num_slots}, but only frozen layers can be streamed; allowed: all")
    return layers.children()


def _frozen_matrices(layer: nn.Module) -> Iterator[Tensor]:
    """The weights that are worth moving, with the scales of packed ones. Tables that matrices may share stay."""
    for module in layer.modules():
        if isinstance(module, PackedLayer):
            yield from module.tensors
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1 and not parameter.requires_grad:
                yield parameter
                yield from (state.absmax for state in _states(parameter))


def _all_tensors(model: nn.Module) -> Iterator[Tensor]:
    """All that a model has, with what bitsandbytes keeps beside a parameter."""
    for module in model.modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            yield tensor
            for state in _states(tensor):
                parts = (getattr(state, name) for name in ("absmax", "code", "offset"))
                yield from (cast(Tensor, part) for part in parts if isinstance(part, Tensor))


def _states(tensor: Any) -> Iterator[Any]:
    """The quantization state of bitsandbytes, and that of its scales."""
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield state
        state = state.state2
