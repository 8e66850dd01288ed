"""What a loss of the Tinker API is on a client's data, and its gradient: between the data and an engine.

Data share micro-batches, and where the engine can, rows. Each sees only itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dualtune.data.batches import Row, RowSizes, SequenceLayout, plan
from dualtune.engine.backend import IGNORE_INDEX, Batch, Engine
from dualtune.engine.memory.estimate import padded
from dualtune.train.comparison import at_targets, with_slopes
from dualtune.use.tinker.losses import loss_of
from dualtune.use.tinker.messages import Datum


class LossSums:
    """The loss of some data, added up over their micro-batches, and what the model says of each datum's targets."""

    def __init__(self, loss: str, config: Mapping[str, float | str], data: Sequence[Datum]) -> None:
        self._loss, self._config, self._data = loss, config, data
        self._values: dict[int, float] = {}
        self.logprobs: dict[int, np.ndarray] = {}  # by datum, float32 in the shape of its targets
        self.num_weighted = 0  # targets that the loss depends on

    @property
    def total(self) -> float:
        """The sum over all targets of all data. It does not depend on how they share micro-batches."""
        return float(np.sum([self._values[i] for i in range(len(self._data))]))

    def forward(self, engine: Engine, batch: Batch) -> dict[int, np.ndarray]:
        """Add a micro-batch, and return the slopes of the loss by datum."""
        slopes: dict[int, np.ndarray] = {}
        for i, logps_T in at_targets(engine.target_logprobs(batch), batch).items():
            values_T, slopes[i] = loss_of(self._loss, logps_T, self._data[i].inputs, self._config)
            self._values[i], self.logprobs[i] = float(values_T.sum()), logps_T
            self.num_weighted += int(np.count_nonzero(slopes[i]))
        return slopes

    def forward_backward(self, engine: Engine, batch: Batch) -> None:
        """Add a micro-batch, and to the engine's gradient that of the loss."""
        weighted = with_weights_only(with_slopes(batch, self.forward(engine, batch)))
        if weighted.num_targets:
            engine.forward_backward(weighted, divisor=1.0)


def micro_batches(data: Sequence[Datum], layout: SequenceLayout) -> Iterator[Batch]:
    """Yield the micro-batches of some data, each token with its targets, without weights.

    Data with as many targets in each place share them. The documents of a micro-batch are the indices of its data.
    """
    by_number: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, datum in enumerate(data):
        by_number[datum.inputs["target_tokens"].shape[1:]].append(i)
    sizes = RowSizes(np.array([len(datum.tokens) for datum in data], np.int64))
    for number, ids in by_number.items():
        for rows in plan(sizes, ids, layout):
            yield _batch(data, rows, number)


def _batch(data: Sequence[Datum], rows: Sequence[Row], number: tuple[int, ...]) -> Batch:
    shape = len(rows), padded(max(sum(len(data[i].tokens) for i in row) for row in rows))
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    labels = np.full((*shape, *number), IGNORE_INDEX, np.int32)
    for b, row in enumerate(rows):
        end = 0
        for segment, i in enumerate(row, start=1):
            start, end = end, end + len(data[i].tokens)
            tokens[b, start:end] = data[i].tokens
            labels[b, start:end] = data[i].inputs["target_tokens"]
            segments[b, start:end] = segment
            positions[b, start:end] = np.arange(end - start)
    seeds = np.zeros(shape, np.uint32)  # these adapters have no dropout
    return Batch(tokens, labels, segments, positions, seeds, documents=tuple(map(tuple, rows)))


def with_weights_only(batch: Batch) -> Batch:
    """Return a micro-batch without the targets that have no weight, and of several in a place with none twice."""
    assert batch.weights_BT is not None
    has_weight_BT = batch.weights_BT != 0
    if batch.labels_BT.ndim == 2:
        return replace(batch, labels_BT=np.where(has_weight_BT, batch.labels_BT, IGNORE_INDEX))
    has_weight_BT = has_weight_BT.any(-1) & batch.is_target_BT
    labels, weights = batch.labels_BT.copy(), batch.weights_BT.copy()
    labels[~has_weight_BT] = IGNORE_INDEX
    sorted_BTK = np.sort(labels, axis=-1)
    has_repeats_BT = has_weight_BT & (np.diff(sorted_BTK, axis=-1) == 0).any(-1)
    for b, t in zip(*np.nonzero(has_repeats_BT), strict=True):
        labels[b, t], weights[b, t] = _without_repeats(labels[b, t], weights[b, t])
    return replace(batch, labels_BT=labels, weights_BT=weights)


def _without_repeats(labels_K: np.ndarray, weights_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct targets with the same loss: repeated ones add up, and others take their places, without weight.

    Clients fill a place up with a token that may be among its targets already.
    """
    distinct, place_K = np.unique(labels_K, return_inverse=True)
    others = np.setdiff1d(np.arange(len(labels_K), dtype=labels_K.dtype), distinct)
    filled = np.concatenate([distinct, others])[: len(labels_K)]
    return filled, np.bincount(place_K, weights_K, len(labels_K)).astype(np.float32)
