"""The numbers of a run's data before training, and warnings about what would silently ruin it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualtune.config import Config, DataConfig
from dualtune.data.batches import RowSizes, SequenceLayout, fill, plan
from dualtune.data.documents import REASONS, Documents, OpenedSource, describe_left_out, notices, unused_valid
from dualtune.data.order import Order
from dualtune.data.preferences import (
    LabelNumbers,
    PairNumbers,
    describe_labels,
    describe_pairs,
    label_numbers,
    pair_numbers,
    preference_warnings,
)
from dualtune.data.similarity import first_equal
from dualtune.data.tokens.control_tokens import control_token_warning
from dualtune.data.tokens.store import Document
from dualtune.data.tokens.tokenize import State
from dualtune.data.tokens.tokenizer import Tokenizer

BARS = 10  # the most bars of the histogram
OUTLIERS = 0.02  # the share of the documents that may be length outliers
MEASURED_STEPS = 200  # steps to measure padding over; more take long and give the same result
PROBED_DOCUMENTS = 1000  # documents per source to check for an end token
MOST_CUT, MOST_DUPLICATES = 0.10, 0.05  # shares that give a warning
LEAST_TARGETS = 0.005  # a smaller share is shown as 0 %


@dataclass(frozen=True, slots=True)
class Lengths:
    """Statistics of the tokens per document."""

    min: int
    median: float
    mean: float
    p90: int  # the 90th percentile: nine in ten documents do not exceed it
    max: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A histogram bar: the number of documents with `first` to `last` tokens, both included."""

    first: int
    last: int
    documents: int


@dataclass(frozen=True, slots=True)
class SourceNumbers:
    """Statistics of the documents of one source."""

    path: str
    documents: int
    tokens: int
    trained_tokens: int
    lengths: Lengths | None  # None: no document


@dataclass(frozen=True, slots=True)
class Survey:
    """Statistics of a run's training data; `dualtune preview --json` prints them under these names."""

    rows: int  # training rows, including dropped ones
    bad_rows: int  # skipped rows, including those of the evaluation data
    first_bad_rows: list[str]  # path:line: reason
    dropped: dict[str, int]  # reason -> rows
    control_text_rows: int  # rows with a control token in their content, including evaluation data
    first_control_text_row: str | None
    documents: int
    answers: int  # documents of a row: 2 where answers are compared, and duplicates are then counted by rows
    pairs: PairNumbers | None  # of the training documents; None: they are not pairs…
    labels: LabelNumbers | None  # …and have no labels
    tokens: int
    trained_tokens: int
    trained_share: float
    message_weights: bool  # whether a message has a weight that is neither 0 nor 1
    lengths: Lengths
    histogram: list[Bar]
    max_length: int
    over_long: int  # rows of more than max_length tokens that have targets: cut, split, or else dropped
    cut: int
    split: int
    longest_row: int  # tokens of the longest row that was read, before truncation
    left_out: dict[str, int]  # duplicates that data.dedup left out: kind -> rows
    duplicates: int  # documents with the same tokens as an earlier one
    first_duplicate: list[str] | None  # path:line of the first one, and of the earlier document
    eval_rows: int
    eval_documents: int
    eval_in_training: int  # evaluation documents that are training documents too
    first_eval_in_training: list[str] | None  # path:line in the evaluation data, and in the training data
    steps: int
    steps_per_epoch: int
    packing: bool  # whether the config enables packing
    fill_packed: float  # the share of the micro-batches' cells that contain a token, with packing…
    fill_alone: float  # …and without
    fill_steps: int  # the number of steps measured, from the first one on


def survey(config: Config, train: Documents, eval_: Documents, order: Order, layout: SequenceLayout) -> Survey:
    """Measure the documents of a run. There must be at least one training document."""
    # Padding is measured on the first steps, with packing and without, whatever the config has.
    per_epoch = steps_per_epoch(order)
    measured = range(min(per_epoch, MEASURED_STEPS))
    steps = [order.step(step).documents.tolist() for step in measured]
    sizes = RowSizes(train.lengths)
    packed, alone = (
        fill(sizes, [rows for ids in steps for rows in plan(sizes, ids, candidate)])
        for candidate in (SequenceLayout(layout.max_tokens, config.data.max_length), SequenceLayout(layout.max_tokens))
    )
    control = train.with_control_text() + eval_.with_control_text()
    repeated = duplicates(train)
    leaks = first_indices(train.unit_digests(), eval_.unit_digests())
    leaked = np.flatnonzero(leaks >= 0)
    answers = train.answers
    stores = {id(store): store for store in (*train.stores, *eval_.stores)}.values()  # a store may contain both
    return Survey(
        rows=train.num_rows,
        bad_rows=sum(store.num_bad for store in stores),
        first_bad_rows=[reason for store in stores for reason in store.bad],
        dropped=train.dropped,
        control_text_rows=len(control),
        first_control_text_row=control[0] if control else None,
        documents=len(train),
        answers=answers,
        pairs=pairs_of(train, config),
        labels=labels_of(train, config),
        tokens=train.num_tokens,
        trained_tokens=train.num_targets,
        trained_share=train.num_targets / train.num_tokens,
        message_weights=train.has_message_weights,
        lengths=lengths_of(train.lengths),
        histogram=histogram(train.lengths),
        max_length=config.data.max_length,
        over_long=train.num_truncated + train.num_split + train.dropped.get(REASONS[State.TOO_LONG], 0),
        cut=train.num_truncated,
        split=train.num_split,
        longest_row=max(int(store.index["row_length"].max(initial=0)) for store in train.stores),
        left_out=dict(train.left_out),
        duplicates=len(repeated),
        first_duplicate=[train[i].where for i in repeated[0]] if repeated else None,
        eval_rows=eval_.num_rows,
        eval_documents=len(eval_),
        eval_in_training=len(leaked),
        first_eval_in_training=(
            [eval_[answers * int(leaked[0])].where, train[answers * int(leaks[leaked[0]])].where]
            if len(leaked)
            else None
        ),
        steps=order.num_steps,
        steps_per_epoch=per_epoch,
        packing=layout.row_length is not None,
        fill_packed=packed,
        fill_alone=alone,
        fill_steps=len(measured),
    )


def pairs_of(train: Documents, config: Config) -> PairNumbers | None:
    """Compare the answers of the pairs to train on; None if the documents are not pairs."""
    if train.answers == 1 or train.has_labels:
        return None
    chosen, rejected = train.row_lengths().reshape(-1, 2).T
    return pair_numbers(chosen, rejected, "tokens", config.data.max_length)


def labels_of(train: Documents, config: Config) -> LabelNumbers | None:
    """Count the labels of the answers to train on; None if they have none."""
    labels = train.labels[::2] if train.answers == 2 else train.labels
    weights = config.preference.desirable_weight, config.preference.undesirable_weight
    return label_numbers(int((labels > 0).sum()), int((labels < 0).sum()), weights)


def steps_per_epoch(order: Order) -> int:
    end = 1
    while order.step(end - 1).epoch < 1:
        end *= 2
    return bisect_right(range(end), 1.0, key=lambda step: order.step(step).epoch)


def histogram(lengths: np.ndarray) -> list[Bar]:
    """Return bars of equal width, from the shortest document to the longest.

    A few documents that are far longer than all others share a wider last bar; otherwise all others would fall into the
    first bar.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    usual = int(np.percentile(lengths, 100 * (1 - OUTLIERS), method="inverted_cdf"))
    has_outliers = longest - shortest > 2 * (usual - shortest + 1)
    end, bars = (usual, BARS - 1) if has_outliers else (longest, BARS)
    width = -(-(end - shortest + 1) // bars)
    starts = np.arange(shortest, end + 1, width)
    if has_outliers:
        starts = np.append(starts, starts[-1] + width)
    counts = np.bincount(np.searchsorted(starts, lengths, "right") - 1, minlength=len(starts))
    ends = [*(starts[1:] - 1).tolist(), longest]
    return [Bar(*bar) for bar in zip(starts.tolist(), ends, counts.tolist(), strict=True)]


def lengths_of(lengths: np.ndarray) -> Lengths:
    """Return the statistics of at least one length."""
    p90 = int(np.percentile(lengths, 90, method="inverted_cdf"))
    return Lengths(int(lengths.min()), float(np.median(lengths)), float(lengths.mean()), p90, int(lengths.max()))


def duplicates(documents: Documents) -> list[tuple[int, int]]:
    """Return (document, the first one equal to it) for each repeated one; of answers of one row, for the first."""
    first = first_equal(documents.unit_digests())
    again = np.flatnonzero(first != np.arange(len(first)))
    answers = documents.answers
    return list(zip((answers * again).tolist(), (answers * first[again]).tolist(), strict=True))


def first_indices(digests: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return int64 [N of others]: the index of each in `digests`, or -1."""
    unique, first = np.unique(digests, return_index=True)
    at = np.minimum(np.searchsorted(unique, others), len(unique) - 1)
    return np.where(unique[at] == others, first[at], -1)


# ----------------------------------------------------------------------------------------------------------------------
# As text for people: a table of the numbers, warnings, and the numbers of each source.


def units_of(numbers: Survey) -> str:
    """Return what the rows to train on are called."""
    return "pairs" if numbers.pairs else "answers" if numbers.labels else "documents"


def describe(numbers: Survey) -> list[tuple[str, str]]:
    """Return the statistics as text: rows of (label, value)."""
    lengths, units = numbers.lengths, units_of(numbers)
    two = ", two for each row" if numbers.answers == 2 else ""
    dropped = ", ".join(f"{number} dropped: {reason}" for reason, number in numbers.dropped.items())
    rows = [
        (
            "rows",
            f"{numbers.rows} to train on, {numbers.eval_rows} to evaluate on, {numbers.bad_rows} bad ones left out",
        ),
        *(("", reason) for reason in numbers.first_bad_rows),
        ("documents", f"{numbers.documents}{two}{f'; {dropped}' if dropped else ''}"),
        *(describe_pairs(numbers.pairs) if numbers.pairs else []),
        *([("labels", describe_labels(numbers.labels))] if numbers.labels else []),
        ("tokens", f"{numbers.tokens}, {numbers.trained_tokens} of them targets ({numbers.trained_share:.1%})"),
        (
            "lengths",
            f"{lengths.min} to {lengths.max} tokens, median {lengths.median:g}, mean {lengths.mean:.1f}, "
            f"90 % up to {lengths.p90}",
        ),
        ("over-long", _over_long(numbers)),
        *([("left out", describe_left_out(numbers.left_out))] if numbers.left_out else []),
        ("duplicates", _with_pair(f"{numbers.duplicates} of the {units}", numbers.first_duplicate)),
    ]
    if numbers.eval_documents:
        number = numbers.eval_documents // numbers.answers
        text = f"{numbers.eval_in_training} of {number} evaluation {units} are in the training data"
        rows.append(("leaks", _with_pair(text, numbers.first_eval_in_training)))
    if numbers.message_weights:
        rows.append(("weights", "messages have loss weights: the loss is the weighted mean over the targets"))
    measured = "" if numbers.fill_steps == numbers.steps_per_epoch else f", in the first {numbers.fill_steps} steps"
    return [
        *rows,
        ("steps", f"{numbers.steps_per_epoch} in an epoch, {numbers.steps} in all"),
        (
            "filled",
            f"{numbers.fill_packed:.1%} of the cells contain a token with packing (which is "
            f"{'on' if numbers.packing else 'off'}), {numbers.fill_alone:.1%} without{measured}",
        ),
    ]


def _over_long(numbers: Survey) -> str:
    if not numbers.over_long:
        return f"no row has more than {numbers.max_length} tokens"
    dropped = numbers.over_long - numbers.cut - numbers.split
    parts = {"cut": numbers.cut, "split": numbers.split, "dropped": dropped}
    became = ", ".join(f"{number} {word}" for word, number in parts.items() if number)
    longest = f"the longest has {numbers.longest_row}"
    return f"{numbers.over_long} of the rows have more than {numbers.max_length} tokens, {longest}; {became}"


def _with_pair(text: str, pair: list[str] | None) -> str:
    return f"{text}, the first: {pair[0]} equals {pair[1]}" if pair else text


def warnings(
    numbers: Survey,
    config: Config,
    sources: Sequence[OpenedSource],
    train: Documents,
    tokenizer: Tokenizer,
    eval_: Documents | None = None,
) -> list[str]:
    """Return warnings about what would silently ruin a training. The documents come from these sources."""
    # Per source first: a mistake in one of them disappears in the numbers of all.
    texts: list[str] = []
    masked = train.lengths - 1 - train.targets  # the first token has no context, so it is never a target
    for s, opened in enumerate(sources):
        source = opened.source
        mine = np.flatnonzero(train.sources == s)
        if not len(mine):
            texts.append(f"{source.path}: no row can be trained on")
            continue
        if train.targets[mine].sum() < LEAST_TARGETS * train.lengths[mine].sum():
            texts.append(f"{source.path}: 0 % of the tokens are targets; check data.loss_on and the template")
        if opened.format() == "text":
            continue
        if tokenizer.template is not None and config.data.loss_on != "all" and not masked[mine].any():
            texts.append(f"{source.path}: 100 % of the tokens are targets, prompts too; check the template")
        if not any(_ends(train[int(i)], tokenizer) for i in mine[:PROBED_DOCUMENTS]):
            advice = "check the template and data.max_length"
            texts.append(f"{source.path}: no end token is a target, so the model would not learn to stop; {advice}")
    # Then what concerns all of the data.
    if tokenizer.warning is not None:
        texts.append(tokenizer.warning)
    parts = [train] if eval_ is None else [train, eval_]
    texts += notices(*parts, all_columns_used=config.rollouts.reads_columns)
    texts += unused_valid(config.data)
    texts += unseen_tokens(config.data, train, tokenizer)
    if numbers.first_control_text_row is not None:
        policy = config.data.special_tokens_in_text
        texts.append(control_token_warning(numbers.control_text_rows, numbers.first_control_text_row, policy))
    if numbers.cut > MOST_CUT * numbers.rows:
        texts.append(f"{numbers.cut / numbers.rows:.0%} of the rows are cut and lose their end; raise data.max_length")
    units, num_units = units_of(numbers), numbers.documents // numbers.answers
    if numbers.duplicates > MOST_DUPLICATES * num_units:
        share = f"{numbers.duplicates / num_units:.0%} of the {units} are duplicates"
        texts.append(f"{share}; remove them, or set data.dedup: exact")
    if numbers.eval_in_training:
        texts.append(
            f"{numbers.eval_in_training} of {numbers.eval_documents // numbers.answers} evaluation {units} are in the "
            "training data, "
            "so the evaluation loss would be too low; remove them from one of the two"
        )
    return texts + preference_warnings(numbers.pairs, numbers.labels)


def _ends(document: Document, tokenizer: Tokenizer) -> bool:
    """Return whether the last targets end an answer."""
    targets = document.tokens[np.flatnonzero(document.loss_mask)].tolist()
    if targets[-1] in tokenizer.stop_ids:
        return True
    stop = tokenizer.stop_text
    return bool(stop) and tokenizer.decode_all(targets[-4 * len(stop) :]).rstrip().endswith(stop)


def by_source(sources: Sequence[OpenedSource], documents: Documents) -> list[SourceNumbers]:
    """Return the statistics of each source; the documents come from these sources."""
    rows: list[SourceNumbers] = []
    for s, opened in enumerate(sources):
        mine = documents.sources == s
        lengths = documents.lengths[mine]
        numbers = len(lengths), int(lengths.sum()), int(documents.targets[mine].sum())
        rows.append(SourceNumbers(opened.source.path, *numbers, lengths_of(lengths) if len(lengths) else None))
    return rows


def unseen_tokens(data: DataConfig, train: Documents, tokenizer: Tokenizer) -> list[str]:
    """Return a warning if new tokens are in no training document: nothing is learned of them."""
    left = {token.text: tokenizer.id_of(token.text) for token in data.added_tokens}
    for index in range(len(train)):
        if not left:
            return []
        ids = {*train[index].tokens.tolist()}
        left = {text: id for text, id in left.items() if id not in ids}
    if not left:
        return []
    special = [text for text in left if text in data.new_special_tokens]
    advice = "; a special token in the text of a row is plain text, unless data.special_tokens_in_text is allow"
    return [f"new tokens in no training document: {', '.join(left)}{advice if special else ''}"]
