"""Layers with a state, in packed rows: each document is computed in a row of its own, so its state begins at zero.

Linear attention, state-space layers and short convolutions carry what they have read from token to token, and no mask
or position stops it at the border of a document. Their inputs are rearranged: documents become rows, in a few calls
with rows of similar length, so that padding at most doubles the tokens. Each document then has exactly the numbers that
it has alone, whatever kernels the layer calls.

Legend: B rows, T tokens of a row; within a call N documents, L tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.errors import ConfigError
from dualtune_torch.host.inputs import to_device
from dualtune_torch.kernels.attention import DocumentBorders
from dualtune_torch.methods import DropoutSeeds

Span = tuple[int, int, int]  # row, first token, end
SHORTEST = 16  # tokens: shorter documents share a call


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tokens of documents are found, and put back, in the flattened rows."""

    shape: tuple[int, int]  # B, T
    calls: list[Tensor]  # int64 [N, L] each: flat indices of tokens; the last token of a document is repeated
    back: Tensor  # int64 [B · T]: indices in the concatenated outputs of the calls; padding takes any


class DocumentRows:
    """Makes the layers of a model that keep a state begin anew in each document. There may be none."""

    def __init__(self, model: PreTrainedModel, seeds: DropoutSeeds) -> None:
        self._seeds = seeds
        self._layout: _Layout | None = None
        self._is_within = False  # the whole model, whose base may not be told of its arguments
        layers = list(_with_state(model))
        for layer in layers:
            layer.forward = partial(self._by_document, layer.forward)
        if layers:
            for module in {model, model.base_model}:
                module.register_forward_pre_hook(self._note_documents, with_kwargs=True)
            model.register_forward_pre_hook(lambda *_: self._enter(True))
            model.register_forward_hook(lambda *_: self._enter(False), always_call=True)

    def _enter(self, is_within: bool) -> None:
        self._is_within = is_within

    def _note_documents(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Remember where the documents are until the next pass: the backward pass may compute layers again."""
        if self._is_within:
            return
        self._layout = None
        documents, positions_BT = options.get("documents"), options.get("position_ids")
        if options.get("use_cache") is not False or (documents is None and positions_BT is None):
            return
        tokens = args[0] if args else options.get("input_ids", options.get("inputs_embeds"))
        shape = tokens.shape[0], tokens.shape[1]
        # Only a model without attention has no documents; its positions are then read from the device.
        spans = _spans(documents) if documents is not None else list(spans_of(positions_BT.cpu().numpy()))
        if any(start for _, start, _ in spans):
            self._layout = _layout(spans, shape, tokens.device)

    def _by_document(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        layout, seeds_BT = self._layout, self._seeds.seeds_BT
        options.pop("documents", None)  # a kernel of this layer could not know the argument
        if layout is None:
            return forward(*args, **options)
        outputs = []
        for call_NL in layout.calls:
            take = partial(_take, shape=layout.shape, call_NL=call_NL)
            self._seeds.seeds_BT = take(seeds_BT)
            try:
                outputs.append(forward(*map(take, args), **{name: take(value) for name, value in options.items()}))
            finally:
                self._seeds.seeds_BT = seeds_BT
        if isinstance(outputs[0], tuple):  # the state after the last token, which training does not use, follows
            return _put_back([output[0] for output in outputs], layout), *outputs[0][1:]
        return _put_back(outputs, layout)


def _with_state(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that own a convolution over tokens: in a language model these keep a state."""
    if any(isinstance(child, nn.Conv1d) for child in model.children()):
        yield model
    else:
        for child in model.children():
            yield from _with_state(child)


def spans_of(positions_BT: np.ndarray) -> Iterator[Span]:
    """Yield the documents in rows: one begins wherever the position is not that of the token before plus one."""
    for row, positions_T in enumerate(positions_BT):
        starts = [0, *(np.flatnonzero(np.diff(positions_T) != 1) + 1).tolist(), len(positions_T)]
        yield from ((row, start, end) for start, end in pairwise(starts))


def _spans(documents: DocumentBorders) -> Iterable[Span]:
    if documents.spans is None:
        raise ConfigError(
            "model.kernels: got graph, but this model has layers with a state, which are launched document by "
            "document; allowed here: auto, fused, reference"
        )
    return documents.spans


def _layout(spans: Iterable[Span], shape: tuple[int, int], device: torch.device) -> _Layout:
    B, T = shape
    by_size: dict[int, list[Span]] = {}
    for span in spans:
        size = max(SHORTEST, 1 << (span[2] - span[1] - 1).bit_length())
        by_size.setdefault(size, []).append(span)
    calls, back, num_before = [], np.zeros(B * T, np.int64), 0
    for _, group in sorted(by_size.items()):
        lengths = np.array([end - start for _, start, end in group])
        first = np.array([row * T + start for row, start, _ in group])
        steps = np.arange(lengths.max())
        call_NL = first[:, None] + np.minimum(steps, lengths[:, None] - 1)
        outputs_NL = num_before + np.arange(call_NL.size).reshape(call_NL.shape)
        is_token_NL = steps < lengths[:, None]
        back[call_NL[is_token_NL]] = outputs_NL[is_token_NL]
        calls.append(call_NL)
        num_before += call_NL.size
    *calls_on_device, back_on_device = to_device([*calls, back], device)
    return _Layout(shape, calls_on_device, back_on_device)


def _take(value: Any, shape: tuple[int, int], call_NL: Tensor) -> Any:
    """Return [N, L, …] for a tensor [B, T, …] or [1, T, …], also in a tuple; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_take(each, shape, call_NL) for each in value)
    B, T = shape
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != T or value.shape[0] not in (1, B):
        return value
    return value.expand(B, *value.shape[1:]).flatten(0, 1)[call_NL]


def _put_back(outputs: list[Tensor], layout: _Layout) -> Tensor:
    flat = torch.cat([output.flatten(0, 1) for output in outputs])
    return flat.index_select(0, layout.back).unflatten(0, layout.shape)
