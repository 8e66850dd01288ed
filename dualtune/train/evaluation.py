"""Evaluation of an engine on documents, during training and from the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import numpy as np

from dualtune.config import Config
from dualtune.data.batches import RowSizes, SequenceLayout, make_batch, plan, share, sizes_of
from dualtune.data.chat.examples import Example
from dualtune.data.documents import Documents, tokenize
from dualtune.engine.backend import IGNORE_INDEX, Batch, Engine, LossSum, OptimizerState
from dualtune.engine.memory.estimate import AUTO_MICRO_BATCH_TOKENS, tokens_at_once
from dualtune.model.adapter import Tensors
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.generation.inference import LoadedModel
from dualtune.train.hooks import EvalRecord
from dualtune.train.recovery import Recovery
from dualtune.train.team import Team

# ----------------------------------------------------------------------------------------------------------------------
# Other weights in an engine for a while: those of the base, of a trial, or of the result of a run.


@contextmanager
def using(engine: Engine, adapter: Tensors) -> Generator[None]:
    """Use other adapter weights inside the block, and always restore the engine's own at its end."""
    before = engine.adapter_state()
    engine.load_adapter_state(adapter)
    try:
        yield
    finally:
        engine.load_adapter_state(before)


@contextmanager
def using_result(engine: Engine, optimizer: OptimizerSpec) -> Generator[None]:
    """Use the result's weights inside the block. If these are the trained ones, nothing is read and nothing is done."""
    if optimizer.trains_the_result:
        yield
    else:
        with using(engine, result_of(optimizer, engine.adapter_state(), engine.optimizer_state())):
            yield


def result_of(optimizer: OptimizerSpec, adapter: Tensors, state: OptimizerState) -> Tensors:
    """Return the weights of the result, float32, from a training state: that of an engine or of a checkpoint."""
    if optimizer.trains_the_result:
        return adapter
    weights = {name: w.copy() for name, w in adapter.items()}
    for name, w in weights.items():
        slots = {slot: own[name] for slot, own in state.slots.items() if name in own}
        # A start that is kept follows what is trained, and has no slots.
        trained = tuple(map(slice, max((values.shape for values in slots.values()), key=math.prod, default=w.shape)))
        w[trained] = optimizer.result(w[trained], slots)
    return weights


# ----------------------------------------------------------------------------------------------------------------------
# What an engine computes of each document alone: its loss, and whether greedy decoding gives its targets.

Measure = Callable[[Batch], np.ndarray]  # returns a value for each row of a micro-batch, [B] or [B, C]
Show = Callable[[int, int], None]  # micro-batches done, and all


def by_document(
    documents: Documents, recovery: Recovery, measure: Measure, show: Show = lambda done, total: None
) -> np.ndarray:
    """Return `measure` of each document, [N] or [N, C]: each is alone in its row, in any micro-batch.

    If memory runs out, the recovery makes its layout smaller, and all is measured again.
    """
    while True:
        groups = plan(RowSizes(documents.lengths), range(len(documents)), SequenceLayout(recovery.layout.max_tokens))
        results: list[np.ndarray] = []

        def work(batch: Batch, results: list[np.ndarray] = results, total: int = len(groups)) -> None:
            results.append(measure(batch))
            show(len(results), total)

        if recovery.attempt(0, (make_batch(documents, rows, seed=0, step=0) for rows in groups), work):
            break
    order = [document for rows in groups for (document,) in rows]
    return np.concatenate(results)[np.argsort(order)] if results else np.zeros(0)


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


# ----------------------------------------------------------------------------------------------------------------------
# The evaluation of a run: the loss over held-out documents, and answers that are exactly right.


def layout_of(config: Config) -> SequenceLayout:
    """Return the sequence layout of a config."""
    longest = config.data.max_length
    return SequenceLayout(
        tokens_at_once(config.train.micro_batch_tokens, longest), longest if config.data.packing else None
    )


def evaluate(
    engine: Engine, documents: Documents, layout: SequenceLayout | Recovery, step: int = 0,
    show: Show = lambda done, total: None, team: Team | None = None,
) -> EvalRecord:  # fmt: skip
    """Return the mean loss over the targets of all documents, weighted by their loss weights.

    `show(done, total)` reports the number of micro-batches done. With several processes each computes its share. A stop
    signal raises Preempted. If memory runs out, a Recovery makes its layout smaller, and all is evaluated again.
    """
    team = team or Team()
    recovery = layout if isinstance(layout, Recovery) else Recovery(None, engine, layout, team=team)
    while (sums := _sums(engine, documents, recovery, step, show, team)) is None:
        pass
    loss_sum, weight, num_targets = team.total(*sums)
    return EvalRecord(step=step, eval_loss=loss_sum / weight, eval_targets=int(num_targets))


def _sums(
    engine: Engine, documents: Documents, recovery: Recovery, step: int, show: Show, team: Team
) -> tuple[float, float, int] | None:
    """Return this process's loss, weight and number of targets. None if memory ran out, in any process."""
    loss_sum, weight, num_targets = 0.0, 0.0, 0
    queued: list[LossSum] = []

    def measure(batch: Batch) -> None:
        nonlocal loss_sum, weight, num_targets
        queued.append(engine.evaluate(batch))
        weight += batch.total_weight
        num_targets += queued[-1].num_targets
        if len(queued) > 1:  # read one batch late, so that the device always has the next one queued
            loss_sum += queued.pop(0).loss_sum

    if not measure_share(documents, recovery, measure, step, show, team):
        return None
    return loss_sum + sum(result.loss_sum for result in queued), weight, num_targets


def measure_share(
    documents: Documents, recovery: Recovery, measure: Callable[[Batch], object], step: int, show: Show, team: Team
) -> bool:
    """Measure this process's micro-batches of the documents. False if memory ran out, in any process: try again."""
    groups = share(sizes_of(documents), range(len(documents)), recovery.layout, team.rank, team.size)
    done = 0

    def counted(batch: Batch) -> None:
        nonlocal done
        measure(batch)
        done += 1
        show(done, len(groups))

    show(0, len(groups))
    return recovery.attempt(step, (make_batch(documents, rows, seed=0, step=step) for rows in groups), counted)


def exact_match(
    model: LoadedModel, examples: Sequence[Example], max_length: int,
    show: Show = lambda done, total: None,
) -> float:  # fmt: skip
    """Return the share of examples with a last answer that greedy decoding reproduces exactly, end token included."""
    recovery = Recovery(None, model.engine, SequenceLayout(AUTO_MICRO_BATCH_TOKENS))
    return float(exact_answers(model, examples, max_length, recovery, show).mean())


def exact_answers(
    model: LoadedModel, examples: Sequence[Example], max_length: int, recovery: Recovery,
    show: Show = lambda done, total: None,
) -> np.ndarray:  # fmt: skip
    """Return bool [examples]: whether greedy decoding reproduces the last answer exactly, end token included.

    Greedy decoding gives an answer if and only if every token of it is the most probable one after those before it, so
    one forward pass is enough. Rows truncated to `max_length` count as wrong.
    """
    documents = tokenize(examples, model.tokenizer, "last", max_length)
    is_exact = by_document(documents, recovery, greedy(model.engine), show)
    whole = ~documents.is_cut()
    is_right = np.zeros(len(examples), bool)
    is_right[documents.rows()[whole]] = is_exact[whole]
    return is_right


def losses_of_examples(
    engine: Engine, documents: Documents, examples: Sequence[Example], recovery: Recovery,
    show: Show = lambda done, total: None,
) -> np.ndarray:  # fmt: skip
    """Return float64 [examples, 2]: the sum of −w·log p over the targets of each example, and its total weight.

    The documents are those of the examples; one that was dropped gives no document, and 0 for both.
    """
    place = {example.where: i for i, example in enumerate(examples)}
    sums = np.zeros((len(examples), 2))
    by_row = by_document(documents, recovery, losses(engine), show)
    np.add.at(sums, [place[documents[i].where] for i in range(len(documents))], by_row)
    return sums
