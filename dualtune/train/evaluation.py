"""Measuring an engine on documents, in training and from the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dualtune import interrupt
from dualtune.backend import IGNORE_INDEX, Engine
from dualtune.config import Config
from dualtune.data.documents import Document, held_out_examples, read_examples, tokenize
from dualtune.data.formats import Example
from dualtune.data.order import micro_batches
from dualtune.errors import DataError
from dualtune.hooks import EvalRecord
from dualtune.train.inference import Model

AUTO_MICRO_BATCH_TOKENS = 2048


def auto_micro_batch_tokens(config: Config) -> int:
    """`train.micro_batch_tokens`, or what auto stands for."""
    given = config.train.micro_batch_tokens
    return max(AUTO_MICRO_BATCH_TOKENS, config.data.max_length) if given == "auto" else given


def evaluate(
    engine: Engine,
    documents: Sequence[Document],
    max_tokens: int,
    step: int = 0,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> EvalRecord:
    """Evaluate in micro-batches of `max_tokens`; `show(done, total)` is called after each."""
    batches = micro_batches(documents, range(len(documents)), max_tokens=max_tokens, seed=0, step=step)
    loss_sum, num_targets = 0.0, 0
    for done, batch in enumerate(batches, start=1):
        interrupt.poll()
        result = engine.evaluate(batch)
        loss_sum += result.loss_sum
        num_targets += result.num_targets
        show(done, len(batches))
    return EvalRecord(step=step, eval_loss=loss_sum / num_targets, eval_targets=num_targets)


def eval_examples(config: Config, data: Path | None) -> list[Example]:
    """The rows of a file, or those that the config evaluates on."""
    return read_examples(config, str(data)) if data else held_out_examples(config)[1]


def measure(model: Model, examples: Sequence[Example], config: Config) -> EvalRecord:
    """The mean loss over the tokens that `data.loss_on` trains."""
    documents = tokenize(examples, model.tokenizer, config.data.loss_on, config.data.max_length)
    if not documents.items:
        raise DataError("the evaluation data has no trainable token within data.max_length")
    return evaluate(model.engine, documents.items, auto_micro_batch_tokens(config))


def exact_match(model: Model, examples: Sequence[Example], max_length: int) -> float:
    """The share of examples whose last answer, end token included, greedy decoding gives token for token.

    Greedy decoding gives an answer if and only if every token of it is the most probable one after those before it, so
    one forward pass tells. Rows that are cut to `max_length` count as wrong.
    """
    documents = [d for d in tokenize(examples, model.tokenizer, "last", max_length).items if len(d.tokens) < max_length]
    exact = 0
    for batch in micro_batches(documents, range(len(documents)), max_tokens=AUTO_MICRO_BATCH_TOKENS, seed=0, step=0):
        interrupt.poll()
        is_target_BT = batch.labels_BT != IGNORE_INDEX
        is_right_BT = model.engine.logprobs(batch).argmax(-1) == batch.labels_BT
        exact += int(np.all(is_right_BT | ~is_target_BT, axis=1).sum())
    return exact / len(examples)
