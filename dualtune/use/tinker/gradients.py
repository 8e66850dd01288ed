"""What a loss of the Tinker API is on a client's data, and its gradient: between the data and an engine.

Data share micro-batches, and where the engine can, rows. Each sees only itself. What data that follow each other have
in common at their beginning, such as the prompt of several samples, is computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dualtune.data.batches import Row, RowSizes, SequenceLayout, plan
from dualtune.engine.backend import IGNORE_INDEX, Batch, Engine
from dualtune.engine.memory.estimate import padded
from dualtune.train.objectives.comparison import at_targets, with_slopes
from dualtune.use.tinker.losses import loss_of, may_have_slope
from dualtune.use.tinker.messages import Datum

LEAST_SHARED = 16  # tokens that data must have in common to be computed together


class ClientData:
    """The data of a call, as they lie in micro-batches."""

    def __init__(self, data: Sequence[Datum], *, shares: bool) -> None:
        """`shares`: whether the engine can compute a common beginning once."""
        self.data = data
        self.targets = [DistinctTargets.of(datum.inputs["target_tokens"]) for datum in data]
        lengths = np.array([len(datum.tokens) for datum in data], np.int64)
        self._sizes = RowSizes(lengths, common_beginnings(data) if shares else None)

    def micro_batches(self, layout: SequenceLayout) -> Iterator[Batch]:
        """Yield the micro-batches, each token with its targets, without weights.

        Data with as many targets in each place share them. The documents of a micro-batch are the indices of its data.
        """
        by_number: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, datum in enumerate(self.data):
            by_number[datum.inputs["target_tokens"].shape[1:]].append(i)
        for number, ids in by_number.items():
            for rows in plan(self._sizes, ids, layout):
                yield self._batch(rows, number)

    def placed(self, row: Row) -> Iterator[tuple[int, int, int]]:
        """Yield each datum of a row, the number of its tokens that are there already, and the datum that has them."""
        parent = row[0]
        for i, added in zip(row, self._sizes.added(row), strict=True):
            num_shared = len(self.data[i].tokens) - added
            parent = parent if num_shared else i
            yield i, num_shared, parent

    def _batch(self, rows: Sequence[Row], number: tuple[int, ...]) -> Batch:
        shape = len(rows), padded(max(map(self._sizes.of, rows)))
        tokens, segments, positions, parents = (np.zeros(shape, np.int32) for _ in range(4))
        labels = np.full((*shape, *number), IGNORE_INDEX, np.int32)
        for b, row in enumerate(rows):
            end, segment_of = 0, {i: segment for segment, i in enumerate(row, start=1)}
            for i, num_shared, parent in self.placed(row):
                datum, start = self.data[i], end
                end += len(datum.tokens) - num_shared
                tokens[b, start:end] = datum.tokens[num_shared:]
                labels[b, start:end] = self.targets[i].labels[num_shared:]
                segments[b, start:end] = segment_of[i]
                positions[b, start:end] = np.arange(num_shared, len(datum.tokens))
                parents[b, start:end] = segment_of[parent] if num_shared else 0
        seeds = np.zeros(shape, np.uint32)  # these adapters have no dropout
        return Batch(
            tokens, labels, segments, positions, seeds, documents=tuple(map(tuple, rows)),
            parents_BT=parents if parents.any() else None,
        )  # fmt: skip


def common_beginnings(data: Sequence[Datum]) -> np.ndarray:
    """Return how many tokens of each datum are those of the first one of its unit, int64; 0 for a first one.

    A unit are data that follow each other and begin with the same tokens and targets. All have the same number of them,
    so that each could be the first.
    """
    shared = np.zeros(len(data), np.int64)
    first, common = 0, 0  # of the present unit; no common beginning is known before its second datum
    for i in range(1, len(data)):
        length = _num_common(data[first], data[i])
        if length >= (common or LEAST_SHARED):
            common = common or length
            shared[i] = common
        else:
            first, common = i, 0
    return shared


def _num_common(one: Datum, other: Datum) -> int:
    """Return how many tokens two data have in common at their beginning, with their targets."""
    targets, others = one.inputs["target_tokens"], other.inputs["target_tokens"]
    length = min(len(one.tokens), len(other.tokens)) - 1  # each has a token of its own
    if targets.shape[1:] != others.shape[1:] or length < 1:
        return 0
    differs = one.tokens[:length] != other.tokens[:length]
    differs |= (targets[:length] != others[:length]).reshape(length, -1).any(-1)
    return int(differs.argmax()) if differs.any() else length


class LossSums:
    """The loss of some data, added up over their micro-batches, and what the model says of each datum's targets."""

    def __init__(self, loss: str, config: Mapping[str, float | str], data: ClientData) -> None:
        self._loss, self._config, self._data = loss, config, data
        self._values: dict[int, float] = {}
        self.logprobs: dict[int, np.ndarray] = {}  # by datum, float32 in the shape of its targets
        self.num_weighted = 0  # targets that the loss depends on

    @property
    def total(self) -> float:
        """The sum over all targets of all data, in their order."""
        return float(np.sum([self._values[i] for i in sorted(self._values)]))

    def forward(self, engine: Engine, batch: Batch) -> None:
        """Add a micro-batch."""
        self._weigh(engine.target_logprobs(batch), batch)

    def forward_backward(self, engine: Engine, batch: Batch) -> None:
        """Add a micro-batch, and to the engine's gradient that of the loss."""
        data = self._data.data
        may_have = {i: may_have_slope(self._loss, data[i].inputs).astype(float) for row in batch.documents for i in row}
        engine.forward_backward_of(self._weighted(batch, may_have), partial(self._weigh, batch=batch), divisor=1.0)

    def _weigh(self, logprobs_BT: np.ndarray, batch: Batch) -> np.ndarray:
        """Return the loss weights with which the engine's own loss has the gradient of this one."""
        own, slopes = at_targets(logprobs_BT, batch), dict[int, np.ndarray]()
        for row in batch.documents:
            for i, num_shared, parent in self._data.placed([*row]):
                logps_T = self._data.targets[i].of_client(own[i], num_shared)
                if num_shared:
                    logps_T = np.concatenate([self.logprobs[parent][:num_shared], logps_T])
                values_T, slopes[i] = loss_of(self._loss, logps_T, self._data.data[i].inputs, self._config)
                self._values[i], self.logprobs[i] = float(values_T.sum()), logps_T
                self.num_weighted += int(np.count_nonzero(slopes[i]))
        weights_BT = self._weighted(batch, slopes).weights_BT
        assert weights_BT is not None
        return weights_BT

    def _weighted(self, batch: Batch, slopes: Mapping[int, np.ndarray]) -> Batch:
        """Return a micro-batch with the weight −slope for each target; one that data share has the slopes of all."""
        of_engine = dict[int, np.ndarray]()
        for row in batch.documents:
            for i, num_shared, parent in self._data.placed([*row]):
                slopes_T = self._data.targets[i].of_engine(slopes[i])
                of_engine[i] = slopes_T[num_shared:].copy()
                if num_shared:
                    of_engine[parent][:num_shared] += slopes_T[:num_shared]
        return with_slopes(batch, of_engine)


@dataclass(frozen=True)
class DistinctTargets:
    """The targets of a datum as an engine takes them: of several in a place, none twice.

    Clients fill a place up with a token that may be among its targets already. Repeated ones are one target of the
    engine, and tokens without a weight take the other places.
    """

    labels: np.ndarray  # int32 [T] or [T, K]
    place_TK: np.ndarray | None = None  # of each target of the client, among the labels; None: they are the same

    @classmethod
    def of(cls, targets: np.ndarray) -> DistinctTargets:
        labels = targets.astype(np.int32)
        if labels.ndim == 1 or (np.diff(np.sort(labels, axis=-1), axis=-1) != 0).all():
            return cls(labels)
        places = np.empty_like(labels)
        for t, tokens_K in enumerate(targets):
            distinct, places[t] = np.unique(tokens_K, return_inverse=True)
            others = np.setdiff1d(np.arange(len(tokens_K)), distinct)
            labels[t] = np.concatenate([distinct, others])[: len(tokens_K)]
        return cls(labels, places)

    def of_client(self, values: np.ndarray, num_shared: int) -> np.ndarray:
        """Return values of the engine's labels, but for the first `num_shared` places, as those of the client's."""
        return values if self.place_TK is None else np.take_along_axis(values, self.place_TK[num_shared:], -1)

    def of_engine(self, slopes: np.ndarray) -> np.ndarray:
        """Return slopes of the client's targets as those of the engine's labels."""
        if self.place_TK is None:
            return slopes
        added = np.zeros_like(slopes)
        np.add.at(added, (np.arange(len(slopes))[:, None], self.place_TK), slopes)
        return added
