"""Evaluation of an engine on documents, during training and from the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dualtune import interrupt
from dualtune.backend import IGNORE_INDEX, Engine, LossSum
from dualtune.config import Config
from dualtune.data.batching.batches import SequenceLayout, make_batch, micro_batches, share
from dualtune.data.chat.formats import Example
from dualtune.data.documents import Documents, tokenize
from dualtune.distributed.team import Team
from dualtune.evaluate.inference import LoadedModel
from dualtune.hooks import EvalRecord
from dualtune.memory.ask import AUTO_MICRO_BATCH_TOKENS, tokens_at_once


def layout_of(config: Config) -> SequenceLayout:
    """Return the sequence layout of a config."""
    longest = config.data.max_length
    return SequenceLayout(
        tokens_at_once(config.train.micro_batch_tokens, longest), longest if config.data.packing else None
    )


def evaluate(
    engine: Engine,
    documents: Documents,
    layout: SequenceLayout,
    step: int = 0,
    show: Callable[[int, int], None] = lambda done, total: None,
    team: Team | None = None,
) -> EvalRecord:
    """Return the mean loss over the targets of all documents, weighted by their loss weights.

    `show(done, total)` reports the number of micro-batches done. With several processes each computes its share. A stop
    signal raises Preempted.
    """
    team = team or Team()
    ids = range(len(documents))
    groups = share(documents.lengths, ids, layout, team.rank, team.size)
    loss_sum, weight, num_targets = 0.0, 0.0, 0
    queued: list[LossSum] = []
    show(0, len(groups))
    for done, rows in enumerate(groups, start=1):
        team.stop_if(interrupt.requested())
        batch = make_batch(documents, rows, seed=0, step=step)
        queued.append(engine.evaluate(batch))
        weight += batch.total_weight
        num_targets += queued[-1].num_targets
        if len(queued) > 1:  # read one batch late, so that the device always has the next one queued
            loss_sum += queued.pop(0).loss_sum
        show(done, len(groups))
    loss_sum += sum(result.loss_sum for result in queued)
    loss_sum, weight, total_targets = team.total(loss_sum, weight, num_targets)
    return EvalRecord(step=step, eval_loss=loss_sum / weight, eval_targets=int(total_targets))


def exact_match(
    model: LoadedModel, examples: Sequence[Example], max_length: int,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> float:  # fmt: skip
    """Return the share of examples with a last answer that greedy decoding reproduces exactly, end token included.

    Greedy decoding gives an answer if and only if every token of it is the most probable one after those before it, so
    one forward pass is enough. Rows truncated to `max_length` count as wrong.
    """
    documents = tokenize(examples, model.tokenizer, "last", max_length)
    whole = np.flatnonzero(documents.lengths < max_length)
    exact = 0
    batches = micro_batches(documents, whole.tolist(), SequenceLayout(AUTO_MICRO_BATCH_TOKENS), seed=0, step=0)
    for done, batch in enumerate(batches):
        show(done, len(batches))
        interrupt.poll()
        is_target_BT = batch.labels_BT != IGNORE_INDEX
        is_right_BT = model.engine.logprobs(batch).argmax(-1) == batch.labels_BT
        exact += int(np.all(is_right_BT | ~is_target_BT, axis=1).sum())
    return exact / len(examples)
