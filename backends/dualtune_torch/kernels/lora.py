"""LoRA layers that read the same activations, as one autograd function with minimal work and memory.

For every layer i of a group, with x the input and x' the input after dropout:

    forward    u = x' Aᵀ (of all layers at once)     y_i = x W_iᵀ + s · u_i B_iᵀ
    backward   v_i = s · g_i B_i    dB_i = s · g_iᵀ u_i    dA = vᵀ x' (at once)    dx = Σ g_i W_i + dropout(v A)

The backward pass takes 4Mr(I+O) operations, because u is kept and v is computed once; autograd of the plain code takes
as many, and two more passes over y. Only x' and u are kept: W is frozen, so x itself is not needed. If x can be
recomputed from what other layers keep (`LoRAGroup.recompute`), only u is kept. Gradients are added to the adapter's
buffer in float32, and nothing is computed below the lowest adapter.

Hu et al., LoRA, arXiv 2106.09685. Shapes: M tokens, I input features, O output features, r rank, S ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dualtune.engine.once_per_input import OncePerInput
from dualtune.model.adapter import tensor_name
from dualtune.model.beside import parameter_name
from dualtune.model.dropout import check_tokens, input_of
from dualtune_torch.adapter import AdapterBuffer
from dualtune_torch.kernels.products import add_product, base_output, product, times
from dualtune_torch.lora import LoRALinear, LoRAPieces, back_g, drop_rule, dropped
from dualtune_torch.methods import AdaptedLayer
from dualtune_torch.weights.frozen import weight_of

PLAIN = LoRAPieces()  # no Triton kernel


class LoRAGroup:
    """Layers that are called with the same tensor, one after another. The first call computes all of them."""

    def __init__(
        self,
        layers: Mapping[str, LoRALinear],
        adapter: AdapterBuffer,
        maybe_compile: Callable[[Any], Any],
        gpu: LoRAPieces,
    ) -> None:
        """Become the `group` of the layers, which come by module path in the order of the buffer."""
        self.layers = list(layers.values())
        self.A_SI = _stacked([adapter.compute[tensor_name(path, "A")] for path in layers])
        self.dA_SI = _stacked([adapter.grads[tensor_name(path, "A")] for path in layers])
        self.B_Or = [adapter.compute[tensor_name(path, "B")] for path in layers]
        self.dB_Or = [adapter.grads[tensor_name(path, "B")] for path in layers]
        # Biases of the base that are trained too.
        self.dbias_O = [adapter.grads.get(parameter_name(f"{path}.bias")) for path in layers]
        self.ranks = [B_Or.shape[1] for B_Or in self.B_Or]
        self.trained = [dB_Or.shape[1] for dB_Or in self.dB_Or]  # of these ranks the first ones; the start has the rest
        self.maybe_compile = maybe_compile
        self.gpu = gpu  # Triton kernels in place of some of the code below
        # Recomputes the input of the next call, which then need not be kept. Set by the code that can do so.
        self.recompute: Callable[[], Tensor] | None = None
        self.input_is_kept = False  # by another operation anyway, before dropout
        self._outputs = OncePerInput[LoRALinear, Tensor]()
        for layer in self.layers:
            layer.group = self

    def __call__(self, layer: LoRALinear, x_BTI: Tensor) -> Tensor:
        return self._outputs.fetch(layer, x_BTI, self._compute)

    def _compute(self, x_BTI: Tensor) -> dict[LoRALinear, Tensor]:
        if self.input_is_kept:
            kept_BTI = x_BTI.detach()
            self.recompute = lambda: kept_BTI
        first = self.layers[0]  # without a trainable input, such as its A, autograd would skip the function
        outputs = _GroupedLoRA.apply(x_BTI, first.lora_A, self, first.dropout_seeds.seeds_BT)
        return dict(zip(self.layers, outputs, strict=True))

    def forget(self) -> None:
        """Drop the outputs that layers have not fetched, and how the next input is recomputed."""
        self._outputs.forget()
        self.recompute = None


def add_groups(
    layers: Mapping[str, AdaptedLayer],
    adapter: AdapterBuffer,
    maybe_compile: Callable[[Any], Any],
    gpu: LoRAPieces = PLAIN,
) -> list[LoRAGroup]:
    """Compute every plain LoRA layer by a group. Most groups have one layer."""
    groups: dict[str, dict[str, LoRALinear]] = {}
    for path, layer in sorted(layers.items()):
        if isinstance(layer, LoRALinear) and layer.grouped:
            groups.setdefault(input_of(path), {})[path] = layer
    return [LoRAGroup(group, adapter, maybe_compile, gpu) for group in groups.values()]


def forget_outputs(layers: Iterable[AdaptedLayer]) -> None:
    """Drop what the groups of these layers hold after an interrupted forward pass."""
    for layer in layers:
        if isinstance(layer, LoRALinear) and isinstance(layer.group, LoRAGroup):
            layer.group.forget()


def _stacked(neighbours: Sequence[Tensor]) -> Tensor:
    """View matrices [r, I] that are adjacent in memory as one [S, I]."""
    first = neighbours[0]
    return first.as_strided((sum(len(matrix) for matrix in neighbours), first.shape[1]), first.stride())


def add_after_dropout(
    dx_MI: Tensor, dlora_MI: Tensor, seeds_M: Tensor, keys_I: Tensor, lowest: int, factor: float
) -> Tensor:
    """Return dx plus the gradient that passes through the dropout."""
    return dx_MI + dropped(dlora_MI, seeds_M, keys_I, lowest, factor)


class _GroupedLoRA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTI: Tensor, anchor: Tensor, group: LoRAGroup, dropout_seeds_BT: Tensor | None
    ) -> tuple[Tensor, ...]:
        x_MI = x_BTI.reshape(-1, x_BTI.shape[-1])
        seeds_M = dropout_seeds_BT.flatten() if dropout_seeds_BT is not None and group.layers[0].dropout else None
        if seeds_M is not None:
            check_tokens(len(x_MI), len(seeds_M))
        kept_MI = _after_dropout(x_MI, group, seeds_M)
        if seeds_M is None or group.gpu.down is None:
            u_MS = product(kept_MI, group.A_SI.T)
        else:
            u_MS = group.gpu.down(kept_MI, group.A_SI, *_mask(group, seeds_M))
        outputs = []
        for layer, B_Or, u_Mr in zip(group.layers, group.B_Or, u_MS.split(group.ranks, dim=1), strict=True):
            y_MO = add_product(base_output(layer.base, x_MI), u_Mr, B_Or.T, layer.scale)
            # No view for autograd: some models change in place what a layer returns.
            outputs.append(torch.ops.aten._unsafe_view(y_MO, [*x_BTI.shape[:-1], y_MO.shape[-1]]))
        ctx.group, ctx.recompute, group.recompute = group, group.recompute, None
        ctx.save_for_backward(kept_MI if ctx.recompute is None else None, u_MS, seeds_M)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads_BTO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept_MI, u_MS, seeds_M = ctx.saved_tensors
        group: LoRAGroup = ctx.group
        if kept_MI is None:
            recompute, ctx.recompute = ctx.recompute, None  # the graph outlives this call, what it keeps need not
            x_BTI = recompute()
            kept_MI = _after_dropout(x_BTI.reshape(-1, x_BTI.shape[-1]), group, seeds_M)
        v_MS = torch.empty_like(u_MS)
        dx_MI = None
        u, v = (both_MS.split(group.ranks, dim=1) for both_MS in (u_MS, v_MS))
        for layer, B_Or, dB_Or, dbias_O, g_BTO, u_Mr, v_Mr in zip(
            group.layers, group.B_Or, group.dB_Or, group.dbias_O, grads_BTO, u, v, strict=True
        ):
            g_MO = g_BTO.reshape(len(kept_MI), -1)
            if dbias_O is not None:
                dbias_O += g_MO.sum(0, dtype=dbias_O.dtype)
            if layer.start is None:
                (group.gpu.back_g or back_g)(g_MO, B_Or, u_Mr, layer.scale, v_Mr, dB_Or)
            else:
                back_g(g_MO, B_Or, u_Mr[:, : dB_Or.shape[1]], layer.scale, v_Mr, dB_Or)
            if ctx.needs_input_grad[0]:
                # Not bound to a name, so that only one unpacked weight exists at a time.
                if dx_MI is None:
                    dx_MI = times(g_MO, weight_of(layer.base, g_MO.dtype))
                else:
                    add_product(dx_MI, g_MO, weight_of(layer.base, g_MO.dtype))
        moved_MS = v_MS
        if group.trained != group.ranks:
            moved_MS = torch.cat([v_Mr[:, :r] for v_Mr, r in zip(v, group.trained, strict=True)], 1)
        if seeds_M is None or group.gpu.add_dA is None:
            add_product(group.dA_SI, moved_MS.T, kept_MI)
        else:
            group.gpu.add_dA(group.dA_SI, moved_MS, kept_MI, *_mask(group, seeds_M))
        if dx_MI is None:
            return None, None, None, None
        if seeds_M is None:
            add_product(dx_MI, v_MS, group.A_SI)
        elif group.gpu.add_dx is not None:
            group.gpu.add_dx(dx_MI, v_MS, group.A_SI, *_mask(group, seeds_M))
        else:
            dx_MI = group.maybe_compile(add_after_dropout)(dx_MI, product(v_MS, group.A_SI), *_mask(group, seeds_M))
        return dx_MI.view(*grads_BTO[0].shape[:-1], -1), None, None, None


def _after_dropout(x_MI: Tensor, group: LoRAGroup, seeds_M: Tensor | None) -> Tensor:
    """What the backward pass keeps: x after dropout, or x if the kernels apply the mask themselves."""
    if seeds_M is None or group.gpu.down is not None:
        return x_MI
    return group.maybe_compile(dropped)(x_MI, *_mask(group, seeds_M))


def _mask(group: LoRAGroup, seeds_M: Tensor) -> tuple[Tensor, Tensor, int, float]:
    """What `dropped` is given besides the numbers."""
    first = group.layers[0]
    return seeds_M, first.keys_I, *drop_rule(first.dropout)
