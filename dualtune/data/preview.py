"""Split a document's text into its messages, to show it to a person.

The content of each message is found by rendering the conversation again with marks around the contents. The rest is
what the template adds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Literal

import numpy as np

from dualtune.config import Config
from dualtune.data.batches import SequenceLayout, fill, plan
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.formats import Example
from dualtune.data.documents import REASONS, Data, Documents, OpenedSource, duplicates_left_out, notices, unused_valid
from dualtune.data.order import Order
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.control_tokens import control_token_warning
from dualtune.data.tokens.store import Document
from dualtune.data.tokens.tokenize import State
from dualtune.data.tokens.tokenizer import Tokenizer

# ----------------------------------------------------------------------------------------------------------------------
# A summary of a run's data before training: statistics, warnings, and documents as text.

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
    per_epoch = steps_per_epoch(order)
    measured = range(min(per_epoch, MEASURED_STEPS))
    steps = [order.step(step).documents.tolist() for step in measured]
    packed, alone = (
        fill(train.lengths, [rows for ids in steps for rows in plan(train.lengths, ids, each)])
        for each in (SequenceLayout(layout.max_tokens, config.data.max_length), SequenceLayout(layout.max_tokens))
    )
    control = train.with_control_text() + eval_.with_control_text()
    repeated = duplicates(train.digests())
    leaks = first_indices(train.digests(), eval_.digests())
    leaked = np.flatnonzero(leaks >= 0)
    stores = {id(store): store for store in (*train.stores, *eval_.stores)}.values()  # a store may contain both
    return Survey(
        rows=train.num_rows,
        bad_rows=sum(store.num_bad for store in stores),
        first_bad_rows=[reason for store in stores for reason in store.bad],
        dropped=train.dropped,
        control_text_rows=len(control),
        first_control_text_row=control[0] if control else None,
        documents=len(train),
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
    found: Survey,
    config: Config,
    sources: Sequence[OpenedSource],
    train: Documents,
    tokenizer: Tokenizer,
    eval_: Documents | None = None,
) -> list[str]:
    """Return warnings about what would silently ruin a training. The documents come from these sources."""
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
    if tokenizer.warning is not None:
        texts.append(tokenizer.warning)
    texts += notices(*([train] if eval_ is None else [train, eval_]))
    texts += unused_valid(config.data)
    if found.first_control_text_row is not None:
        policy = config.data.special_tokens_in_text
        texts.append(control_token_warning(found.control_text_rows, found.first_control_text_row, policy))
    if found.cut > MOST_CUT * found.rows:
        texts.append(f"{found.cut / found.rows:.0%} of the rows are cut and lose their end; raise data.max_length")
    if found.duplicates > MOST_DUPLICATES * found.documents:
        share = f"{found.duplicates / found.documents:.0%} of the documents are duplicates"
        texts.append(f"{share}; remove them, or set data.dedup: exact")
    if found.eval_in_training:
        texts.append(
            f"{found.eval_in_training} of {found.eval_documents} evaluation documents are in the training data, "
            "so the evaluation loss would be too low; remove them from one of the two"
        )
    return texts


def by_source(sources: Sequence[OpenedSource], documents: Documents) -> list[SourceNumbers]:
    """Return the statistics of each source; the documents come from these sources."""
    found: list[SourceNumbers] = []
    for s, opened in enumerate(sources):
        mine = documents.sources == s
        lengths = documents.lengths[mine]
        numbers = len(lengths), int(lengths.sum()), int(documents.targets[mine].sum())
        found.append(SourceNumbers(opened.source.path, *numbers, lengths_of(lengths) if len(lengths) else None))
    return found


def describe(found: Survey) -> list[tuple[str, str]]:
    """Return the statistics as text: rows of (label, value)."""
    lengths = found.lengths
    dropped = ", ".join(f"{number} dropped: {reason}" for reason, number in found.dropped.items())
    rows = [
        ("rows", f"{found.rows} to train on, {found.eval_rows} to evaluate on, {found.bad_rows} bad ones left out"),
        *(("", reason) for reason in found.first_bad_rows),
        ("documents", f"{found.documents}{f'; {dropped}' if dropped else ''}"),
        ("tokens", f"{found.tokens}, {found.trained_tokens} of them targets ({found.trained_share:.1%})"),
        (
            "lengths",
            f"{lengths.min} to {lengths.max} tokens, median {lengths.median:g}, mean {lengths.mean:.1f}, "
            f"90 % up to {lengths.p90}",
        ),
        ("over-long", _over_long(found)),
        *([("left out", duplicates_left_out(found.left_out))] if found.left_out else []),
        ("duplicates", _with_pair(f"{found.duplicates} of the documents", found.first_duplicate)),
    ]
    if found.eval_documents:
        text = f"{found.eval_in_training} of {found.eval_documents} evaluation documents are in the training data"
        rows.append(("leaks", _with_pair(text, found.first_eval_in_training)))
    if found.message_weights:
        rows.append(("weights", "messages have loss weights: the loss is the weighted mean over the targets"))
    measured = "" if found.fill_steps == found.steps_per_epoch else f", in the first {found.fill_steps} steps"
    return [
        *rows,
        ("steps", f"{found.steps_per_epoch} in an epoch, {found.steps} in all"),
        (
            "filled",
            f"{found.fill_packed:.1%} of the cells contain a token with packing (which is "
            f"{'on' if found.packing else 'off'}), {found.fill_alone:.1%} without{measured}",
        ),
    ]


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


# --- documents as text -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownToken:
    id: int
    text: str
    is_target: bool
    special: bool = False  # a special token, not a piece of text
    weight: float = 1.0  # loss weight, if it is a target


@dataclass(frozen=True, slots=True)
class ShownDocument:
    where: str
    tokens: list[ShownToken]
    has_control_text: bool = False  # the row's content contains a control token

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def num_targets(self) -> int:
        return sum(token.is_target for token in self.tokens)

    def runs(self) -> list[tuple[float, str]]:
        """Return (loss weight, text) of each run of tokens with the same weight: 0 for no target, 1 by default."""
        grouped = groupby(self.tokens, key=lambda token: token.weight if token.is_target else 0.0)
        return [(weight, "".join(token.text for token in tokens)) for weight, tokens in grouped]


def first_documents(train: Documents, order: Order, tokenizer: Tokenizer, number: int) -> list[ShownDocument]:
    """Return the documents that the run trains on first."""
    ids = (int(i) for step in range(order.num_steps) for i in order.step(step).documents)
    return [show_document(train[i], tokenizer.decode_all, tokenizer.special_ids) for i in islice(ids, number)]


def show_document(
    document: Document, decode: Callable[[Sequence[int]], str], special_ids: Container[int] = ()
) -> ShownDocument:
    ids: list[int] = document.tokens.tolist()
    mask = [False, *document.loss_mask[1:].tolist()]  # the first token has no context, so it is never a target
    weights = [1.0] * len(ids) if document.weights is None else document.weights.tolist()
    tokens = map(ShownToken, ids, pieces(ids, decode), mask, (id in special_ids for id in ids), weights)
    return ShownDocument(document.where, list(tokens), document.has_control_text)


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text of each token; joined, they give the whole text. A character of several tokens is in the last."""
    found: list[str] = []
    start = done = 0  # ids[start:done] are decoded, and are the context for the next ones
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            found.append("")
            continue
        found.append(text[len(decode(ids[start:done])) :])
        start, done = done, end
    return found


# --- parts -----------------------------------------------------------------------------------------------------------


def lengths_of(lengths: np.ndarray) -> Lengths:
    """Return the statistics of at least one length."""
    p90 = int(np.percentile(lengths, 90, method="inverted_cdf"))
    return Lengths(int(lengths.min()), float(np.median(lengths)), float(lengths.mean()), p90, int(lengths.max()))


def duplicates(digests: np.ndarray) -> list[tuple[int, int]]:
    """Return (document, the first one equal to it) for each repeated document."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    first = first[inverse]
    again = np.flatnonzero(first != np.arange(len(digests)))
    return list(zip(again.tolist(), first[again].tolist(), strict=True))


def first_indices(digests: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return int64 [N of wanted]: the index of each in `digests`, or -1."""
    known, first = np.unique(digests, return_index=True)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, first[at], -1)


def _ends(document: Document, tokenizer: Tokenizer) -> bool:
    """Return whether the last targets end an answer."""
    targets = document.tokens[np.flatnonzero(document.loss_mask)].tolist()
    if targets[-1] in tokenizer.stop_ids:
        return True
    stop = tokenizer.stop_text
    return bool(stop) and tokenizer.decode_all(targets[-4 * len(stop) :]).rstrip().endswith(stop)


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


# ----------------------------------------------------------------------------------------------------------------------
# Sample rows of a run's data for a person to look at: the first ones, and notable ones of several kinds.


@dataclass(frozen=True, slots=True)
class SampleKind:
    """A reason to look at a row. The page has a filter for each kind."""

    name: str
    title: str
    total: int  # the number of rows of this kind in the data; some of them are samples


@dataclass(frozen=True, slots=True)
class Sample:
    """A document and its kinds."""

    where: str
    kinds: frozenset[str]
    turns: list[Turn]
    num_tokens: int
    num_targets: int
    lost: int  # tokens of the row lost by truncation
    original: str | None  # path:line of the document that it repeats


def kinds_of(found: Survey) -> list[SampleKind]:
    """Return the kinds in display order."""
    return [
        SampleKind("first", "Trained first", found.documents),
        SampleKind("bad", "Bad", found.bad_rows),
        SampleKind("cut", "Cut", found.cut),
        SampleKind("duplicate", "Duplicates", found.duplicates),
        SampleKind("longest", "Longest", found.documents),
        SampleKind("control", "Control tokens in text", found.control_text_rows),
        SampleKind("evaluation", "Evaluation", found.eval_documents),
    ]


def samples(
    data: Data, train: Documents, eval_: Documents, order: Order, tokenizer: Tokenizer, number: int
) -> list[Sample]:
    """Return up to `number` documents of each kind, each document once, in the order of the kinds."""
    repeated = dict(duplicates(train.digests()))
    chosen = {
        "first": islice((int(i) for step in range(order.num_steps) for i in order.step(step).documents), number),
        "cut": np.flatnonzero(train.is_cut())[:number].tolist(),
        "duplicate": islice(repeated, number),
        "longest": np.argsort(-train.lengths, kind="stable")[:number].tolist(),
        "control": np.flatnonzero(train.has_control_text())[:number].tolist(),
    }
    kinds: dict[int, set[str]] = {}
    for kind, ids in chosen.items():
        for i in ids:
            kinds.setdefault(i, set()).add(kind)
    shown = [(train, i, frozenset(names)) for i, names in kinds.items()]
    shown += [(eval_, i, frozenset({"evaluation"})) for i in range(min(number, len(eval_)))]
    examples = _examples(data.sources, {documents[i].where for documents, i, _ in shown})
    return [
        _sample(documents, i, names, examples, tokenizer, train[repeated[i]].where if "duplicate" in names else None)
        for documents, i, names in shown
    ]


def _sample(
    documents: Documents, i: int, kinds: frozenset[str], examples: dict[str, Example], tokenizer: Tokenizer,
    original: str | None,
) -> Sample:  # fmt: skip
    document = show_document(documents[i], tokenizer.decode_all, tokenizer.special_ids)
    lost = int(documents.row_lengths()[i]) - len(document.tokens) if documents.is_cut()[i] else 0
    turns = turns_of(document, examples.get(document.where), tokenizer)
    return Sample(document.where, kinds, turns, len(document.tokens), document.num_targets, lost, original)


def _examples(sources: Sequence[OpenedSource], wanted: Iterable[str]) -> dict[str, Example]:
    """Read the examples at these locations (path:line) again."""
    missing, found = set(wanted), dict[str, Example]()
    for opened in sources:
        for example in opened.examples():
            if not missing:
                return found
            if isinstance(example, Example) and example.where in missing:
                found[example.where] = example
                missing.remove(example.where)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# frame: what the template adds; call: an assistant's tool calls; tools: the functions that are offered
TurnKind = Literal["content", "frame", "call", "tools"]
MARK = "\ue000\ue001\ue000"  # private-use characters; no template handles them specially
HEAD = 64  # characters used to find the text after what the tokenizer puts before it


@dataclass(frozen=True, slots=True)
class TurnPart:
    kind: TurnKind
    tokens: list[ShownToken]


@dataclass(frozen=True, slots=True)
class Turn:
    """A message with its frame. `role` is "template" for text outside any message, "text" for a whole plain text."""

    role: str
    parts: list[TurnPart]


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a message's content in the text."""

    role: str
    start: int
    end: int
    after: TurnKind = "frame"  # kind of the text after the content, up to the end of the turn


def turns_of(document: ShownDocument, example: Example | None, tokenizer: Tokenizer) -> list[Turn]:
    """Return the turns of a document; a single turn with the whole text if its messages cannot be found in it."""
    places = _places(document.text, example, tokenizer) if example else []
    if not places:
        return [Turn("text", [TurnPart("content", document.tokens)])]
    starts: list[int] = []
    at = 0
    for token in document.tokens:
        starts.append(at)
        at += len(token.text)
    turns: list[Turn] = []
    head: list[ShownToken] = []  # head of the next message
    done = 0  # tokens
    for place, following in zip(places, [*places[1:], None], strict=True):
        begin, end = (bisect_left(starts, at) for at in (place.start, place.end))
        until = bisect_left(starts, following.start) if following else len(starts)
        head += document.tokens[done:begin]
        after, between, head_of_next = _split_between(document.tokens[end:until], tokenizer, is_last=following is None)
        if not turns:
            _, before, head = _split_between(head, tokenizer, is_last=False, is_first=True)
            turns += _turn("template", [TurnPart("tools" if example and example.tools else "frame", before)])
        text, closing = _without_end(after)
        space, text = _without_space(text)
        turns += _turn(
            place.role,
            [
                TurnPart("frame", head), TurnPart("content", document.tokens[begin:end]),
                TurnPart("frame", space), TurnPart(place.after, text), TurnPart("frame", closing),
            ],
        )  # fmt: skip
        turns += _turn("template", [TurnPart("frame", between)])
        head, done = head_of_next, until
    return turns


def _turn(role: str, parts: Sequence[TurnPart]) -> list[Turn]:
    full = [part for part in parts if part.tokens]
    return [Turn(role, full)] if full else []


Tokens = list[ShownToken]


def _split_between(
    tokens: Tokens, tokenizer: Tokenizer, *, is_last: bool, is_first: bool = False
) -> tuple[Tokens, Tokens, Tokens]:
    """Split the tokens between two contents: end of the first turn, whole template turns, head of the next turn."""
    if is_last:
        return tokens, [], []
    ends = [i + 1 for i, token in enumerate(tokens) if token.id in tokenizer.stop_ids]
    if not ends:
        return [], [], tokens
    first = 0 if is_first else ends[0]
    return tokens[:first], tokens[first : ends[-1]], tokens[ends[-1] :]


def _without_end(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Return (the text after a content, the tokens that end the turn, from the first special one on)."""
    at = next((i for i, token in enumerate(tokens) if token.special), len(tokens))
    if not "".join(token.text for token in tokens[:at]).strip():
        return [], tokens
    return tokens[:at], tokens[at:]


def _without_space(tokens: Tokens) -> tuple[Tokens, Tokens]:
    at = next((i for i, token in enumerate(tokens) if token.text.strip()), len(tokens))
    return tokens[:at], tokens[at:]


def _places(text: str, example: Example, tokenizer: Tokenizer) -> list[_Place]:
    if tokenizer.template is not None and example.messages:
        rendered, places = _in_chat(example, tokenizer)
    elif example.completion is not None and not example.is_text:
        prompt = example.prompt or ""
        rendered = prompt + example.completion
        places = [_Place("prompt", 0, len(prompt)), _Place("completion", len(prompt), len(rendered))]
    else:
        return []
    shift = text.find(rendered[: min(HEAD, len(text) // 2)])
    shown = text[max(shift, 0) :]
    if shift < 0 or not (rendered.startswith(shown) or shown.startswith(rendered)):
        return []  # the tokenizer has changed the text
    moved = [replace(p, start=p.start + shift, end=min(p.end + shift, len(text))) for p in places]
    return [place for place in moved if place.start < len(text)]


def _in_chat(example: Example, tokenizer: Tokenizer) -> tuple[str, list[_Place]]:
    try:
        messages, text, _ = tokenizer.render_folded(example.messages, tools=example.tools)
        example = replace(example, messages=tuple(messages))
        marked = tokenizer.render([_marked(message) for message in example.messages], tools=example.tools)
    except RowError:
        return "", []
    pieces = marked.split(MARK)
    filled = [message for message in example.messages if message.content.strip()]
    if len(pieces) != 2 * len(filled) + 1 or "".join(pieces) != text:
        return text, []
    places: list[_Place] = []
    at = read = 0  # the end of the last content, empty ones included; the end of the last piece
    contents = iter(zip(pieces[::2], pieces[1::2], strict=False))
    for i, message in enumerate(example.messages):
        if message.content.strip():
            before, content = next(contents)
            start, end = read + len(before), read + len(before) + len(content)
            read = end
        else:
            start = end = max(at, _start_of_turn(i, text, example, tokenizer))
        places.append(_Place(message.role, start, end, _kind_after(message, example)))
        at = end
    return text, places


def _start_of_turn(i: int, text: str, example: Example, tokenizer: Tokenizer) -> int:
    """Return where assistant message `i`, which consists of tool calls, starts after its head; 0 if unknown."""
    try:
        before = tokenizer.render(example.messages[:i], tools=example.tools, add_generation_prompt=True)
    except RowError:
        return 0
    return len(before) if text.startswith(before) else 0


def _marked(message: Message) -> Message:
    bare = message.content.strip()  # some templates trim it
    return replace(message, content=message.content.replace(bare, f"{MARK}{bare}{MARK}", 1)) if bare else message


def _kind_after(message: Message, example: Example) -> TurnKind:
    if message.extra.get("tool_calls"):
        return "call"
    return "tools" if message.role == "system" and example.tools else "frame"
