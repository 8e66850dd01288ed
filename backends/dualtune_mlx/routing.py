"""What the routers of a mixture choose, and the gradient that evens it out (`dualtune.engine.routing`) on MLX.

mlx-lm's routers are linear layers that return logits. Their class changes, so that the gradient is added at what they
return: neither a second forward pass nor another output of the model is needed, and a layer that is recomputed does it
where its backward pass is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import Batch
from dualtune.engine.routing import KEY, document_shares, experts_of_token, routing_metrics
from dualtune.model.targets import is_in_router
from dualtune_mlx.methods import linear_layers, linear_shape

Arrays = dict[str, mx.array]
# Among the inputs of a micro-batch; the last two where documents share their beginning.
FIRST, SIZE, SHARE = "routing first_N", "routing size_N", "routing share_N"
TOKEN, DOCUMENT = "routing token_M", "routing document_M"
LOSS, COUNTS = "routing loss", "routing counts_LE"  # what is added up over a step


class Routing:
    """Watches the routers of a model in the micro-batches of a step."""

    def __init__(
        self, model: nn.Module, paths: Collection[str], config: Mapping[str, Any], coefficient: float, loss_scale: float
    ) -> None:
        """`paths`: of the routers. `loss_scale`: by which all gradients are multiplied.

        ConfigError for a model without such routers.
        """
        self._each = experts_of_token(config, coefficient)
        self._slope_scale = coefficient * loss_scale
        self._num_layers = len(paths)
        self._documents: Arrays | None = None  # of the micro-batch; None: nothing is watched
        self._noted: dict[int, tuple[mx.array, mx.array]] = {}  # loss and counts [E] of the micro-batch, by layer
        if not paths:
            raise ConfigError(f"{KEY}: mlx-lm has no linear routers in {type(model).__module__}; allowed: null")
        modules = dict(model.named_modules())
        self._mixtures = [modules[path.rpartition(".")[0]] for path in paths]  # which may correct the choice
        self._num_experts = 0
        for number, path in enumerate(paths):
            router: Any = modules[path]
            self._num_experts = linear_shape(getattr(router, "base", router))[0]
            if not getattr(type(router), "is_watched", False):
                router.__class__ = _watched(type(router))
            object.__setattr__(router, "watching", (self, number))  # no part of the model

    def inputs(self, batch: Batch, divisor: float) -> Arrays:
        """Return what the loss needs to know of a micro-batch, as inputs of its function."""
        first_N, size_N, share_N, token_M, document_M = document_shares(batch, divisor)
        arrays = {FIRST: first_N, SIZE: size_N, SHARE: share_N}
        if len(token_M):
            # One of a few lengths, for which steps are compiled: the rest belongs to a document after the last token.
            rest = (1 << (len(token_M) - 1).bit_length()) - len(token_M)
            arrays |= {
                TOKEN: np.pad(token_M, (0, rest)),
                DOCUMENT: np.pad(document_M, (0, rest), constant_values=len(first_N)),
            }
        return {name: mx.array(x) for name, x in arrays.items()}

    @contextmanager
    def watching(self, inputs: Arrays) -> Iterator[None]:
        """Count what routers choose, and add their gradient, in the forward and backward pass inside the block."""
        self._documents = inputs
        self._noted.clear()
        try:
            yield
        finally:
            self._documents = None

    def added(self, sums: Arrays) -> Arrays:
        """Return what a step adds up, with that of the micro-batch just watched."""
        noted = [self._noted[number] for number in range(self._num_layers)]
        self._noted.clear()
        counts_LE = mx.stack([counts for _, counts in noted])
        return {LOSS: sums[LOSS] + mx.stack([loss for loss, _ in noted]).sum(), COUNTS: sums[COUNTS] + counts_LE}

    def nothing(self) -> Arrays:
        """Return what a step adds up, before its first micro-batch."""
        return {LOSS: mx.array(0.0), COUNTS: mx.zeros((self._num_layers, self._num_experts))}

    def metrics(self, sums: Arrays) -> Arrays:
        """Return the metrics of a step, on the device, from what it has added up over all processes."""
        counts_LE = sums[COUNTS]
        busiest = (counts_LE.max(axis=-1) / mx.maximum(counts_LE.sum(axis=-1), 1)).max()
        return cast(Arrays, routing_metrics(sums[LOSS], busiest, (counts_LE == 0).sum()))

    def noted(self, number: int, logits: mx.array) -> mx.array:
        """Return the logits of a layer's router, at which the gradient of the loss is added in the backward pass."""
        if (documents := self._documents) is None:
            return logits
        size_N = documents[SIZE]
        probs_NE = mx.softmax(mx.stop_gradient(logits).reshape(-1, logits.shape[-1]).astype(mx.float32), axis=-1)
        ranked_NE = probs_NE + self._mixtures[number].get("correction", 0.0)  # as `families.corrections` chooses
        top_Nk = mx.argpartition(-ranked_NE, kth=self._each - 1, axis=-1)[:, : self._each]
        ones_N1 = (size_N > 0)[:, None].astype(mx.float32)
        chosen_NE = mx.put_along_axis(mx.zeros_like(probs_NE), top_Nk, ones_N1, axis=-1)
        counts_E, loads_NE = _loads(chosen_NE, documents)
        overlap_N1 = (probs_NE * loads_NE).sum(axis=-1, keepdims=True)
        scale = probs_NE.shape[-1] / self._num_layers
        # A layer that is recomputed calls its router again.
        self._noted.setdefault(number, (scale * overlap_N1.sum(), counts_E))
        if not self._slope_scale:
            return logits
        slopes_NE = self._slope_scale * scale * probs_NE * (loads_NE - overlap_N1)
        return cast(mx.array, with_slopes(logits, slopes_NE.astype(logits.dtype).reshape(logits.shape)))


def _loads(chosen_NE: mx.array, documents: Arrays) -> tuple[mx.array, mx.array]:
    """Return how often each expert was chosen, and for each token Σ share · f of the documents that it belongs to."""
    first_N, size_N, share_N = (documents[name] for name in (FIRST, SIZE, SHARE))
    after_1E = mx.zeros_like(chosen_NE[:1])  # a document that no token is part of
    counts_NE = mx.concatenate([mx.zeros_like(chosen_NE), after_1E]).at[first_N].add(chosen_NE)
    if TOKEN in documents:
        counts_NE = counts_NE.at[documents[DOCUMENT]].add(chosen_NE[documents[TOKEN]])
    loads_NE = counts_NE[first_N] * (share_N / mx.maximum(size_N, 1))[:, None]
    if TOKEN in documents:
        own_NE = mx.concatenate([loads_NE, after_1E])
        loads_NE = loads_NE.at[documents[TOKEN]].add(own_NE[documents[DOCUMENT]])
    return counts_NE[:-1].sum(axis=0), loads_NE


@mx.custom_function
def with_slopes(logits: mx.array, slopes: mx.array) -> mx.array:
    """The logits as they are. The backward pass adds the slopes."""
    return logits


@with_slopes.vjp
def _(inputs: tuple[mx.array, mx.array], slope: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    return slope + inputs[1], mx.zeros_like(inputs[1])


@cache
def _watched(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array) -> mx.array:
        routing, number = cast("tuple[Routing, int]", self.watching)
        return routing.noted(number, kind.__call__(self, x))  # pyright: ignore[reportCallIssue]

    return type(kind.__name__, (kind,), {"__call__": call, "is_watched": True, "__module__": kind.__module__})


def find_routers(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers that are routers, in the order of layers; before any layer is wrapped."""
    return [path for path in linear_layers(model) if is_in_router(path)]
