"""Adapter inputs that the backward pass recomputes from what other operations keep anyway.

A norm keeps its input, from which its output follows; attention keeps its output, from which the same after dropout
follows. Which of them a model keeps depends on its code, its dtype and the kernels, so a trial run finds it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualtune.base.errors import ConfigError
from dualtune_torch.kernels.lora import LoRAGroup

KEY = "memory.checkpointing"


def recompute_inputs(
    model: nn.Module, groups: Collection[LoRAGroup], trial: Callable[[], object]
) -> Callable[[], object]:
    """Let groups of LoRA layers recompute their input, and return what lets them keep all inputs again.

    `trial` runs the model once. ConfigError if no input can be recomputed.
    """
    if not groups:
        raise ConfigError(
            f"{KEY}: got adapter_inputs, but they are recomputed only by the fast LoRA kernel, which is not used here "
            "(model.kernels: reference, or another adapter.method); allowed: none, full, {layers: …}"
        )
    # The trial runs as if no group kept its input, so that what is saved is saved by other operations.
    inputs: dict[LoRAGroup, Tensor] = {}  # of the groups that cannot recompute it yet
    norms: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # the input and the output of each
    saved: dict[int, Tensor] = {}  # by address; alive, so that no address is used twice

    def note_input(group: LoRAGroup, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if group.recompute is _nothing:
            inputs[group] = args[0].detach()

    def note_norm(norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        norms[norm] = args[0].detach(), output.detach()

    def note_saved(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with ExitStack() as undo:
        for group in groups:
            group.recompute = _nothing
            undo.callback(setattr, group, "recompute", None)
            for layer in group.layers:
                undo.callback(layer.register_forward_pre_hook(partial(note_input, group)).remove)
        for module in model.modules():
            if type(module).__name__.endswith("Norm"):
                undo.callback(module.register_forward_hook(note_norm).remove)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note_saved, lambda x: x):
            trial()

    # A group whose own input is saved needs nothing else; one that reads a norm gets the norm's input.
    keep_all = ExitStack()
    for group, x in inputs.items():
        if x.untyped_storage().data_ptr() in saved:
            group.input_is_kept = True
            keep_all.callback(setattr, group, "input_is_kept", False)
    is_recomputed = any(group.input_is_kept for group in groups)
    for norm, (x, output) in norms.items():
        readers = [group for group, read in inputs.items() if read.data_ptr() == output.data_ptr()]
        if readers and x.untyped_storage().data_ptr() in saved:
            keep_all.callback(norm.register_forward_hook(partial(_offer, readers)).remove)
            is_recomputed = True
    if not is_recomputed:
        raise ConfigError(
            f"{KEY}: got adapter_inputs, but no adapter of this model ({type(model).__name__}) reads the output of a "
            "norm or of attention whose source is kept; allowed: none, full, {layers: …}"
        )
    return keep_all.close


def _offer(readers: list[LoRAGroup], norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    """Tell the groups that read a norm's output how to recompute it."""
    if torch.is_grad_enabled():
        x = args[0].detach()
        for group in readers:
            group.recompute = lambda: norm.forward(x)


def _nothing() -> Tensor:
    raise AssertionError("a trial has no backward pass")
