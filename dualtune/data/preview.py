"""A run's documents as a person sees them: tokens as text, samples of several kinds, and the messages in them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from typing import Any, Literal

import numpy as np

from dualtune.base.redaction import redact
from dualtune.config import Config
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example, answers
from dualtune.data.documents import Data, Documents, OpenedSource
from dualtune.data.order import Order
from dualtune.data.sources.rows import RowError
from dualtune.data.survey import Survey, duplicates, first_indices, histogram, labels_of, lengths_of, pairs_of
from dualtune.data.tokens.store import Document
from dualtune.data.tokens.tokenizer import Tokenizer

TurnKind = Literal["content", "frame", "call", "tools"]
MARK = "\ue000\ue001\ue000"  # private-use characters; no template handles them specially
HEAD = 64  # characters used to find the text after what the tokenizer puts before it
# Of a sample row, in characters: what is context, at each end of a part; a part that is target; all of it.
CONTEXT, TARGET, SAMPLE = 200, 8_000, 20_000
SAMPLE_TOKENS = 8192  # that are decoded for it


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token as a preview shows it."""

    id: int
    text: str
    is_target: bool
    special: bool = False  # a special token, not a piece of text
    weight: float = 1.0  # loss weight, if it is a target


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """A document as a preview shows it, token by token."""

    where: str
    tokens: list[ShownToken]
    has_control_text: bool = False  # the row's content contains a control token
    answer: str = ""  # of a preference: chosen, rejected, desirable or undesirable

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
    """Return the documents of the rows that the run trains on first: of pairs, both answers side by side."""
    return [
        replace(show_document(train[i], tokenizer.decode_all, tokenizer.special_ids), answer=answer_of(train, i))
        for unit in islice(_units(order, train), number)
        for i in unit
    ]


def _units(order: Order, train: Documents) -> Iterator[list[int]]:
    """Yield the documents of each row in order, without those that are not shown."""
    num_answers, is_shown = train.answers, _is_shown(train)
    for step in range(order.num_steps):
        for unit in order.step(step).documents.reshape(-1, num_answers):
            yield unit[is_shown[unit]].tolist()


def _is_shown(documents: Documents) -> np.ndarray:
    """Return bool [N]: false for the answers to other prompts by which answers with a label are judged."""
    shown = np.ones(len(documents), bool)
    if documents.has_labels:
        shown[1::2] = False
    return shown


def answer_of(documents: Documents, i: int) -> str:
    """Return which answer of a preference a document is; "" if there is nothing to compare."""
    if label := int(documents.labels[i]):
        return "desirable" if label > 0 else "undesirable"
    return ("chosen", "rejected")[i % 2] if documents.answers == 2 else ""


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
    texts: list[str] = []
    start = done = 0  # ids[start:done] are decoded, and are the context for the next ones
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(decode(ids[start:done])) :])
        start, done = done, end
    return texts


# ----------------------------------------------------------------------------------------------------------------------
# Samples: the documents that are trained first, and notable ones of several kinds, each with its messages.


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
    answer: str = ""  # of a preference: chosen, rejected, desirable or undesirable


def kinds_of(numbers: Survey) -> list[SampleKind]:
    """Return the kinds in display order."""
    return [
        SampleKind("first", "Trained first", numbers.documents),
        SampleKind("bad", "Bad", numbers.bad_rows),
        SampleKind("cut", "Cut", numbers.cut),
        SampleKind("duplicate", "Duplicates", numbers.duplicates),
        SampleKind("longest", "Longest", numbers.documents),
        SampleKind("control", "Control tokens in text", numbers.control_text_rows),
        SampleKind("evaluation", "Evaluation", numbers.eval_documents),
    ]


def samples(
    data: Data, train: Documents, eval_: Documents, order: Order, tokenizer: Tokenizer, number: int
) -> list[Sample]:
    """Return up to `number` documents of each kind, each document once, in the order of the kinds."""
    repeated = dict(duplicates(train))
    is_shown = _is_shown(train)
    chosen = {
        "first": (i for unit in islice(_units(order, train), number) for i in unit),
        "cut": np.flatnonzero(train.is_cut() & is_shown)[:number].tolist(),
        "duplicate": islice(repeated, number),
        "longest": np.argsort(-train.lengths * is_shown, kind="stable")[:number].tolist(),
        "control": np.flatnonzero(train.has_control_text() & is_shown)[:number].tolist(),
    }
    kinds: dict[int, set[str]] = {}
    for kind, ids in chosen.items():
        for i in ids:
            kinds.setdefault(i, set()).add(kind)
    shown = [(train, i, frozenset(names)) for i, names in kinds.items()]
    shown += [(eval_, i, frozenset({"evaluation"})) for i in np.flatnonzero(_is_shown(eval_))[:number].tolist()]
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
    lost = documents.row_length(i) - len(document.tokens) if documents.is_cut()[i] else 0
    example, answer = examples.get(document.where), answer_of(documents, i)
    if example:
        example = answers(example)[-1 if answer in ("rejected", "undesirable") else 0]
    turns = turns_of(document, example, tokenizer)
    return Sample(document.where, kinds, turns, len(document.tokens), document.num_targets, lost, original, answer)


def _examples(sources: Sequence[OpenedSource], places: Iterable[str]) -> dict[str, Example]:
    """Read the examples at these places (path:line) again."""
    missing, examples = set(places), dict[str, Example]()
    for opened in sources:
        for example in opened.examples():
            if not missing:
                return examples
            if isinstance(example, Example) and example.where in missing:
                examples[example.where] = example
                missing.remove(example.where)
    return examples


# ----------------------------------------------------------------------------------------------------------------------
# The messages of a document. The content of each is found by rendering the conversation again with marks around the
# contents; the rest is what the template adds.


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
    # Between the contents of two messages stand the end of the first turn, turns of the template, and the next head.
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
        at = next((i for i, token in enumerate(text) if token.text.strip()), len(text))
        space, text = text[:at], text[at:]
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


# ----------------------------------------------------------------------------------------------------------------------
# What each run records of its documents in environment.json: cheap enough for every run, and read without a tokenizer.


def counts(
    config: Config, train: Documents, eval_: Documents, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Return what environment.json records of the data; of no training document, nothing.

    `decode` gives the text of token ids: a few sample rows are recorded, without secrets, their targets whole.
    """
    if not len(train):
        return {}
    digests, shown = train.unit_digests(), np.flatnonzero(_is_shown(train))
    return {
        "rows": train.num_rows,
        "bad_rows": train.num_bad,
        "dropped": train.dropped,
        "cut": train.num_truncated,
        "split": train.num_split,
        "documents": len(train),
        "pairs": asdict(pairs) if (pairs := pairs_of(train, config)) else None,
        "labels": asdict(labels) if (labels := labels_of(train, config)) else None,
        "tokens": train.num_tokens,
        "trained_tokens": train.num_targets,
        "lengths": asdict(lengths_of(train.lengths)),
        "histogram": [asdict(bar) for bar in histogram(train.lengths)],
        "left_out": dict(train.left_out),
        "duplicates": len(digests) - len(np.unique(digests)),
        "eval_documents": len(eval_),
        "eval_in_training": int((first_indices(digests, eval_.unit_digests()) >= 0).sum()),
        "sources": [
            {"path": source.path, **_of_source(train, number)} for number, source in enumerate(config.data.sources())
        ],
        "samples": [
            sample_row(train, i, decode) | {"answer": _which_answer(train, i)}
            for i in shown[sorted({0, len(shown) // 2, len(shown) - 1})].tolist()
        ],
    }


def _which_answer(documents: Documents, i: int) -> str:
    """Return what a preference says of the answer of a document; "" if none is there."""
    if documents.has_labels:
        return {1: "desirable", -1: "undesirable"}.get(int(documents.labels[i]), "")
    return ("chosen", "rejected")[i % 2] if documents.answers == 2 else ""


def sample_row(documents: Documents, i: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return a document to be shown: its place, its text, and [start, end) of each run of targets in the text.

    Long context loses its middle, so that the targets are there whole. A text with a secret has no targets: without the
    secret, the places in it are others.
    """
    document = documents[i]
    tokens, loss_mask = document.tokens[:SAMPLE_TOKENS], document.loss_mask[:SAMPLE_TOKENS]
    runs = [*show_document(replace(document, tokens=tokens, loss_mask=loss_mask, weights=None), decode).runs()]
    whole = "".join(part for _, part in runs)
    if (shown := redact(whole)) != whole:
        return {"where": document.where, "text": _without_middle(shown, TARGET // 2), "targets": []}
    text, targets = "", list[tuple[int, int]]()
    for weight, part in runs:
        if len(text) >= SAMPLE:
            break
        part = _without_middle(part, TARGET // 2 if weight else CONTEXT)
        if weight:
            targets.append((len(text), len(text) + len(part)))
        text += part
    is_whole = len(document.tokens) <= SAMPLE_TOKENS and len(text) < SAMPLE
    return {"where": document.where, "text": text if is_whole else f"{text}…", "targets": targets}


def _without_middle(text: str, end: int) -> str:
    """Return a text of which at most `end` characters at both ends are left."""
    return text if len(text) <= 2 * end else f"{text[:end]} … {text[-end:]}"


def _of_source(documents: Documents, number: int) -> dict[str, int]:
    mine = documents.sources == number
    tokens, targets = (int(numbers[mine].sum()) for numbers in (documents.lengths, documents.targets))
    return {"documents": int(mine.sum()), "tokens": tokens, "trained_tokens": targets}
