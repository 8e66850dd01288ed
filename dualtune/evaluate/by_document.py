"""What an engine computes of each document alone: its loss, and whether greedy decoding gives its targets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dualtune.backend import IGNORE_INDEX, Batch, Engine
from dualtune.data.batching.batches import SequenceLayout, make_batch, plan
from dualtune.data.documents import Documents
from dualtune.evaluate.recovery import Recovery

Measure = Callable[[Batch], np.ndarray]  # returns a value for each row of a micro-batch, [B] or [B, C]
Show = Callable[[int, int], None]  # micro-batches done, and all


def by_document(
    documents: Documents, recovery: Recovery, measure: Measure, show: Show = lambda done, total: None
) -> np.ndarray:
    """Return `measure` of each document, [N] or [N, C]: each is alone in its row, in any micro-batch.

    If memory runs out, the recovery makes its layout smaller, and all is measured again.
    """
    while True:
        groups = plan(documents.lengths, range(len(documents)), SequenceLayout(recovery.layout.max_tokens))
        found: list[np.ndarray] = []

        def work(batch: Batch, found: list[np.ndarray] = found, total: int = len(groups)) -> None:
            found.append(measure(batch))
            show(len(found), total)

        if recovery.attempt(0, (make_batch(documents, rows, seed=0, step=0) for rows in groups), work):
            break
    order = [document for rows in groups for (document,) in rows]
    return np.concatenate(found)[np.argsort(order)] if found else np.zeros(0)


def losses(engine: Engine) -> Measure:
    """Return a measure, float64 [B, 2]: Σ −w·log p over the targets of a row, and Σ w, with the loss weights w."""

    def measure(batch: Batch) -> np.ndarray:
        logprobs_BT = engine.target_logprobs(batch).astype(np.float64)
        weights_BT = batch.target_weights_BT
        if weights_BT is None:
            weights_BT = batch.labels_BT != IGNORE_INDEX
        return np.stack([-(weights_BT * logprobs_BT).sum(1), weights_BT.sum(1, dtype=np.float64)], axis=1)

    return measure


def greedy(engine: Engine) -> Measure:
    """Return a measure, bool [B]: whether every target is the most probable token after those before it."""

    def measure(batch: Batch) -> np.ndarray:
        is_right_BT = engine.most_probable(batch) == batch.labels_BT
        return np.all(is_right_BT | (batch.labels_BT == IGNORE_INDEX), axis=1)

    return measure
