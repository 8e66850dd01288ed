"""Layers with a state, in packed rows: each document is computed in a row of its own (`dualtune.engine.documents`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune.engine.documents import Span, document_rows, spans_of
from dualtune_torch.host.inputs import to_device
from dualtune_torch.kernels.attention import DocumentBorders
from dualtune_torch.methods import DropoutSeeds


class SeparateDocuments:
    """Makes the layers of a model that keep a state begin anew in each document. There may be none."""

    def __init__(self, model: PreTrainedModel, seeds: DropoutSeeds) -> None:
        self._seeds = seeds
        self._shape = 0, 0  # of the rows, (B, T)
        self._calls: list[Tensor] = []  # `DocumentRows` on the device; none: each row is one document
        self._back: Tensor | None = None
        self._is_within = False  # the whole model, whose base may not be told of its arguments
        layers = list(_with_state(model))
        self.has_layers = bool(layers)
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
        self._calls = []
        documents: DocumentBorders | None = options.get("documents")
        positions_BT: Tensor | None = options.get("position_ids")
        if options.get("use_cache") is not False:  # text is continued
            return
        # Only a model without attention has no documents here; its positions are read from the device.
        if documents is not None:
            spans = _spans(documents)
        elif positions_BT is not None:
            spans = spans_of(positions_BT.cpu().numpy())
        else:
            return
        tokens_BT: Tensor = args[0] if args else options["input_ids"]
        self._shape = tokens_BT.shape[0], tokens_BT.shape[1]
        if (rows := document_rows(spans, self._shape)) is not None:
            *self._calls, self._back = to_device([*rows.calls, rows.back], tokens_BT.device)

    def _by_document(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        options.pop("documents", None)  # a kernel of this layer could not know the argument
        if not self._calls:
            return forward(*args, **options)
        seeds_BT, outputs = self._seeds.seeds_BT, []
        for call_NL in self._calls:
            take = partial(self._take, call_NL)
            self._seeds.seeds_BT = take(seeds_BT)
            try:
                outputs.append(forward(*map(take, args), **{name: take(value) for name, value in options.items()}))
            finally:
                self._seeds.seeds_BT = seeds_BT
        if isinstance(outputs[0], tuple):  # the state after the last token, which training does not use, follows
            return self._put_back([output[0] for output in outputs]), *outputs[0][1:]
        return self._put_back(outputs)

    def _take(self, call_NL: Tensor, value: Any) -> Any:
        """Return [N, L, …] for a tensor [B, T, …] or [1, T, …], also in a tuple; anything else as it is."""
        if isinstance(value, tuple):
            return tuple(self._take(call_NL, item) for item in value)
        B, T = self._shape
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != T or value.shape[0] not in (1, B):
            return value
        return value.expand(B, *value.shape[1:]).flatten(0, 1)[call_NL]

    def _put_back(self, outputs: list[Tensor]) -> Tensor:
        assert self._back is not None
        flat = torch.cat([output.flatten(0, 1) for output in outputs])
        return flat.index_select(0, self._back).unflatten(0, self._shape)


def _with_state(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that own a convolution over tokens: in a language model these keep a state."""
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        yield module
    else:
        for child in module.children():
            yield from _with_state(child)


def _spans(documents: DocumentBorders) -> Iterable[Span]:
    if documents.spans is None:
        raise ConfigError(
            "model.kernels: got graph, but this model has layers with a state, which are launched document by "
            "document; allowed here: auto, fused, reference"
        )
    return documents.spans
