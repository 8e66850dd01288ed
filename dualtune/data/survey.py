"""What a run's data look like before it trains on them: numbers, what is wrong with them, and documents as text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from dualtune.config import Config
from dualtune.data.batches import Layout, fill, plan
from dualtune.data.documents import REASONS, Documents, Opened
from dualtune.data.order import Order
from dualtune.data.store import Document
from dualtune.data.tokenize import State
from dualtune.data.tokenizer import Tokenizer

BARS = 10  # of the histogram, at the most
MEASURED_STEPS = 200  # whose padding is measured; more would take long and say the same
PROBED_DOCUMENTS = 1000  # of a source, that are searched for an end token
MOST_CUT, MOST_DUPLICATES = 0.10, 0.05  # shares from which on a warning is due
LEAST_TRAINED = 0.005  # below it, the share is shown as 0 %


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a document."""

    min: int
    median: float
    mean: float
    p90: int  # the least that nine in ten documents do not exceed
    max: int


@dataclass(frozen=True, slots=True)
class Bar:
    """How many documents have from `first` to `last` tokens, both included."""

    first: int
    last: int
    documents: int


@dataclass(frozen=True, slots=True)
class Survey:
    """The numbers of a run's training data; `dualtune preview --json` prints them under these names."""

    rows: int  # that training has, dropped ones too
    bad_rows: int  # left out, of the evaluation data too
    first_bad_rows: list[str]  # path:line: reason
    dropped: dict[str, int]  # reason -> rows
    documents: int
    tokens: int
    trained_tokens: int
    trained_share: float
    lengths: Lengths
    histogram: list[Bar]
    max_length: int
    over_long: int  # rows of more than max_length tokens that had something to learn: cut, split, or else dropped
    cut: int
    split: int
    longest_row: int  # tokens before anything was cut, of all rows that were read
    duplicates: int  # documents that are equal to one before them, token for token
    first_duplicate: list[str] | None  # where it is, and where its twin before it
    eval_rows: int
    eval_documents: int
    eval_in_training: int  # evaluation documents that are training documents too
    first_eval_in_training: list[str] | None  # where it is in the evaluation data, and where in the training data
    steps: int
    steps_per_epoch: int
    packing: bool  # whether the config has it on
    fill_packed: float  # the share of the micro-batches' cells that hold a token, with packing…
    fill_alone: float  # …and without
    fill_steps: int  # over so many steps, from the first one on


def survey(config: Config, train: Documents, eval_: Documents, order: Order, layout: Layout) -> Survey:
    """Measure the documents of a run. There must be one to train on."""
    per_epoch = steps_per_epoch(order)
    measured = range(min(per_epoch, MEASURED_STEPS))
    steps = [order.step(step).documents.tolist() for step in measured]
    packed, alone = (
        fill(train.lengths, [rows for ids in steps for rows in plan(train.lengths, ids, each)])
        for each in (Layout(layout.max_tokens, config.data.max_length), Layout(layout.max_tokens))
    )
    twins = _twins(train.digests())
    leaks = _places_in(train.digests(), eval_.digests())
    leaked = np.flatnonzero(leaks >= 0)
    stores = {id(store): store for store in (*train.stores, *eval_.stores)}.values()  # one may hold both
    return Survey(
        rows=train.num_rows,
        bad_rows=sum(store.num_bad for store in stores),
        first_bad_rows=[reason for store in stores for reason in store.bad],
        dropped=train.dropped,
        documents=len(train),
        tokens=train.num_tokens,
        trained_tokens=train.num_targets,
        trained_share=train.num_targets / train.num_tokens,
        lengths=_lengths(train.lengths),
        histogram=histogram(train.lengths),
        max_length=config.data.max_length,
        over_long=train.num_truncated + train.num_split + train.dropped.get(REASONS[State.TOO_LONG], 0),
        cut=train.num_truncated,
        split=train.num_split,
        longest_row=max(int(store.index["row_length"].max(initial=0)) for store in train.stores),
        duplicates=len(twins),
        first_duplicate=[train[i].where for i in twins[0]] if len(twins) else None,
        eval_rows=eval_.num_rows,
        eval_documents=len(eval_),
        eval_in_training=len(leaked),
        first_eval_in_training=(
            [eval_[int(leaked[0])].where, train[int(leaks[leaked[0]])].where] if len(leaked) else None
        ),
        steps=order.num_steps,
        steps_per_epoch=per_epoch,
        packing=layout.row_length is not None,
        fill_packed=packed,
        fill_alone=alone,
        fill_steps=len(measured),
    )


def warnings(
    found: Survey, config: Config, sources: Sequence[Opened], train: Documents, tokenizer: Tokenizer
) -> list[str]:
    """What would ruin a training in silence. The documents come from these sources."""
    texts: list[str] = []
    masked = train.lengths - 1 - train.targets  # the first token has nothing before it, so it cannot be learned
    for s, opened in enumerate(sources):
        source = opened.source
        mine = np.flatnonzero(train.sources == s)
        if not len(mine):
            texts.append(f"{source.path}: no row of it can be trained on")
            continue
        if train.targets[mine].sum() < LEAST_TRAINED * train.lengths[mine].sum():
            texts.append(f"{source.path}: 0 % of the tokens are trained; check data.loss_on and the template")
        if opened.format() == "text":
            continue
        if tokenizer.template is not None and config.data.loss_on != "all" and not masked[mine].any():
            texts.append(f"{source.path}: 100 % of the tokens are trained, questions too; check the template")
        if not any(_ends(train[int(i)], tokenizer.stop_ids) for i in mine[:PROBED_DOCUMENTS]):
            advice = "check the template and data.max_length"
            texts.append(f"{source.path}: no end token is learned, so the model would not stop; {advice}")
    if tokenizer.warning is not None:
        texts.append(tokenizer.warning)
    if found.cut > MOST_CUT * found.rows:
        texts.append(f"{found.cut / found.rows:.0%} of the rows are cut and lose their end; raise data.max_length")
    if found.duplicates > MOST_DUPLICATES * found.documents:
        texts.append(f"{found.duplicates / found.documents:.0%} of the documents are duplicates; remove them")
    if found.eval_in_training:
        texts.append(
            f"{found.eval_in_training} of {found.eval_documents} evaluation documents are in the training data, "
            "so the evaluation would flatter the model; remove them from either"
        )
    return texts


def describe(found: Survey) -> list[tuple[str, str]]:
    """The numbers in words: (what, the numbers)."""
    lengths = found.lengths
    dropped = ", ".join(f"{number} dropped: {reason}" for reason, number in found.dropped.items())
    rows = [
        ("rows", f"{found.rows} to train on, {found.eval_rows} to evaluate on, {found.bad_rows} bad ones left out"),
        *(("", reason) for reason in found.first_bad_rows),
        ("documents", f"{found.documents}{f'; {dropped}' if dropped else ''}"),
        ("tokens", f"{found.tokens}, {found.trained_tokens} of them trained ({found.trained_share:.1%})"),
        (
            "lengths",
            f"{lengths.min} to {lengths.max} tokens, median {lengths.median:g}, mean {lengths.mean:.1f}, "
            f"nine in ten up to {lengths.p90}",
        ),
        ("over-long", _over_long(found)),
        ("duplicates", _with_pair(f"{found.duplicates} of the documents", found.first_duplicate)),
    ]
    if found.eval_documents:
        text = f"{found.eval_in_training} of {found.eval_documents} evaluation documents are in the training data"
        rows.append(("leaks", _with_pair(text, found.first_eval_in_training)))
    measured = "" if found.fill_steps == found.steps_per_epoch else f", in the first {found.fill_steps} steps"
    return [
        *rows,
        ("steps", f"{found.steps_per_epoch} in an epoch, {found.steps} in all"),
        (
            "filled",
            f"{found.fill_packed:.1%} of the cells hold a token with packing (which is "
            f"{'on' if found.packing else 'off'}), {found.fill_alone:.1%} without{measured}",
        ),
    ]


def steps_per_epoch(order: Order) -> int:
    end = 1
    while order.step(end - 1).epoch < 1:
        end *= 2
    return bisect_right(range(end), 1.0, key=lambda step: order.step(step).epoch)


def histogram(lengths: np.ndarray) -> list[Bar]:
    """Bars of equal width, from the shortest document to the longest."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // BARS)
    counts: list[int] = np.bincount((lengths - shortest) // width).tolist()
    starts = range(shortest, longest + 1, width)
    return [Bar(at, min(at + width - 1, longest), n) for at, n in zip(starts, counts, strict=True)]


# --- documents as text -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownToken:
    id: int
    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class ShownDocument:
    where: str
    tokens: list[ShownToken]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def num_trained(self) -> int:
        return sum(token.trained for token in self.tokens)

    def runs(self) -> list[tuple[bool, str]]:
        """(whether it is trained, its text) of every run of tokens that are alike in this."""
        grouped = groupby(self.tokens, key=lambda token: token.trained)
        return [(trained, "".join(token.text for token in tokens)) for trained, tokens in grouped]


def first_documents(train: Documents, order: Order, tokenizer: Tokenizer, number: int) -> list[ShownDocument]:
    """The documents that the run trains on first."""
    ids = (int(i) for step in range(order.num_steps) for i in order.step(step).documents)
    return [show_document(train[i], tokenizer.decode_all) for i in islice(ids, number)]


def show_document(document: Document, decode: Callable[[Sequence[int]], str]) -> ShownDocument:
    ids: list[int] = document.tokens.tolist()
    trained = [False, *document.trained[1:].tolist()]  # the first token has nothing before it to learn it from
    tokens = map(ShownToken, ids, pieces(ids, decode), trained)
    return ShownDocument(document.where, list(tokens))


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token; joined, that of all. A character of several tokens belongs to the last of them."""
    found: list[str] = []
    start = done = 0  # ids[start:done] are known, and what the next ones are decoded after
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            found.append("")
            continue
        found.append(text[len(decode(ids[start:done])) :])
        start, done = done, end
    return found


def visible(text: str) -> str:
    """Printable text: control characters, which could steer a terminal, as their pictures or as \\x9b."""

    def picture(found: re.Match[str]) -> str:
        code = ord(found[0])
        return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"\\x{code:02x}"

    text = text.encode(errors="replace").decode()  # names of files may hold what is no character
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", picture, text)


# --- parts -----------------------------------------------------------------------------------------------------------


def _lengths(lengths: np.ndarray) -> Lengths:
    p90 = int(np.percentile(lengths, 90, method="inverted_cdf"))
    return Lengths(int(lengths.min()), float(np.median(lengths)), float(lengths.mean()), p90, int(lengths.max()))


def _twins(digests: np.ndarray) -> list[tuple[int, int]]:
    """(document, the first one that is equal to it) of each that is not the first of its kind."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    first = first[inverse]
    again = np.flatnonzero(first != np.arange(len(digests)))
    return list(zip(again.tolist(), first[again].tolist(), strict=True))


def _places_in(digests: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """int64 [N of wanted]: where each is among the digests, or -1."""
    known, first = np.unique(digests, return_index=True)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, first[at], -1)


def _ends(document: Document, stop_ids: frozenset[int]) -> bool:
    """Whether the last token that is learned ends an answer."""
    return int(document.tokens[np.flatnonzero(document.trained)[-1]]) in stop_ids


def _over_long(found: Survey) -> str:
    if not found.over_long:
        return f"no row has more than {found.max_length} tokens"
    rest = found.over_long - found.cut - found.split
    parts = (f"{found.cut} cut", f"{found.split} split", f"{rest} dropped")
    became = ", ".join(part for part in parts if not part.startswith("0 "))
    longest = f"the longest has {found.longest_row}"
    return f"{found.over_long} of the rows have more than {found.max_length} tokens, {longest}; {became}"


def _with_pair(text: str, pair: list[str] | None) -> str:
    return f"{text}, the first: {pair[0]} equals {pair[1]}" if pair else text
