"""Adapter inputs that the backward pass recomputes from what other operations keep anyway.

A norm keeps its input, from which its output follows; attention keeps its output, from which the same after dropout
follows. Which of them a model keeps depends on its code, its dtype and the kernels, so a trial run finds it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualtune.base.errors import ConfigError
from dualtune_torch.kernels.lora import LoRAGroup

KEY = "memory.checkpointing"


class RemadeInputs:
    """Lets groups of LoRA layers recompute their input, until it is turned off."""

    def __init__(self, model: nn.Module, groups: Collection[LoRAGroup], trial: Callable[[], object]) -> None:
        """`trial` runs the model once. ConfigError if no input can be recomputed."""
        if not groups:
            raise ConfigError(
                f"{KEY}: got adapter_inputs, but they are recomputed only by the fast LoRA kernel, which is not used "
                "here (model.kernels: reference, or another adapter.method); allowed: none, full, {layers: …}"
            )
        kept = _Kept(model, groups)
        kept.watch(trial)
        self._groups = [group for group in groups if kept.has(kept.inputs.get(group))]
        self._hooks = [
            norm.register_forward_hook(partial(_offer, readers))
            for norm, seen in kept.norms.items()
            if kept.has(seen.input) and (readers := [g for g in groups if _same(kept.inputs.get(g), seen.output)])
        ]
        if not self._groups and not self._hooks:
            raise ConfigError(
                f"{KEY}: got adapter_inputs, but no adapter of this model ({type(model).__name__}) reads the output "
                "of a norm or of attention whose source is kept; allowed: none, full, {layers: …}"
            )
        for group in self._groups:
            group.input_is_kept = True

    def remove(self) -> None:
        """Keep all inputs again."""
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            group.input_is_kept = False


def _offer(readers: list[LoRAGroup], norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    """Tell the groups that read a norm's output how to recompute it."""
    if torch.is_grad_enabled():
        x = args[0].detach()
        for group in readers:
            group.recompute = lambda: norm.forward(x)


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.data_ptr() == b.data_ptr()


@dataclass
class _Seen:
    input: Tensor
    output: Tensor


@dataclass
class _Kept:
    """What a forward pass keeps for the backward pass, apart from the inputs of groups."""

    model: nn.Module
    groups: Collection[LoRAGroup]
    inputs: dict[LoRAGroup, Tensor] = field(default_factory=dict)  # of the groups that cannot recompute it yet
    norms: dict[nn.Module, _Seen] = field(default_factory=dict)
    saved: dict[int, Tensor] = field(default_factory=dict)  # by address; alive, so that no address is used twice

    def has(self, x: Tensor | None) -> bool:
        return x is not None and x.untyped_storage().data_ptr() in self.saved

    def watch(self, trial: Callable[[], object]) -> None:
        hooks: list[RemovableHandle] = []
        for group in self.groups:
            group.recompute = _nothing  # then the group does not keep its input
            note = partial(self._note_group, group)
            hooks += [layer.register_forward_pre_hook(note) for layer in group.layers]
        for module in self.model.modules():
            if type(module).__name__.endswith("Norm"):
                hooks.append(module.register_forward_hook(self._note_norm))
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda x: x):
                trial()
        finally:
            for hook in hooks:
                hook.remove()
            for group in self.groups:
                group.recompute = None

    def _note_group(self, group: LoRAGroup, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if group.recompute is _nothing:
            self.inputs[group] = args[0].detach()

    def _note_norm(self, norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.norms[norm] = _Seen(args[0].detach(), output.detach())

    def _note_saved(self, tensor: Tensor) -> Tensor:
        self.saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor


def _nothing() -> Tensor:
    raise AssertionError("a trial has no backward pass")
