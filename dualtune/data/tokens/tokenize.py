"""Convert examples to token ids and loss masks.

The rule: render the whole conversation once, find the target characters (`masks.py`), and tokenize once with offsets. A
token is a target if it contains a character of a target range. If a token would cross the border of a range, the text
is split there and the pieces are tokenized separately, because the prompt also ends there in generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import islice, pairwise, product

import numpy as np

from dualtune.base import interrupt
from dualtune.data.chat.examples import EQUAL_TEXTS, Example, answers, judged
from dualtune.data.chat.row_values import FOREIGN, NO_BOS
from dualtune.data.sources.rows import BadRow, RowError
from dualtune.data.tokens.masks import NO_END, Rendered, render_example
from dualtune.data.tokens.tokenizer import Tokenizer

ENCODE_ROWS = 1000
END_TOKENS = 4  # the most tokens with which a template ends a turn

# Token ids int32 [T], with character offsets int32 [T, 2], or with the loss mask: bool [T], or float32 [T] loss weights
# if the row has weights, 0 for tokens that are not targets.
Tokens = tuple[np.ndarray, np.ndarray]


class State(IntEnum):
    """The outcome of tokenizing a row."""

    WHOLE = 0
    CUT = 1  # to max_length
    SPLIT = 2  # a plain text in pieces of max_length
    NO_TARGET = 3  # dropped
    TOO_LONG = 4  # dropped: no target within max_length


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """The documents of a row, and what a store records of it."""

    path: str
    line: int
    number: int  # of the row in its source, from 0; bad rows do not count
    lengths: tuple[int, ...]  # of the row's own answers in tokens, before truncation
    state: State
    documents: list[Tokens]  # (token ids, loss mask); none if the row was dropped
    answers: int = 1  # 2: the documents are the two answers of a preference, or those of `with_other_answers`
    label: int = 0  # 1: a desirable answer, -1: an undesirable one
    control_token: str | None = None  # the first one in the content
    notices: frozenset[str] = frozenset()  # kinds of `row_values.py` and `masks.py`


@dataclass(frozen=True, slots=True)
class _Ready:
    """A rendered row that is ready to be tokenized."""

    example: Example
    rendered: tuple[Rendered, ...]  # one, or the two answers of a preference
    number: int


def tokenize_rows(
    examples: Iterable[Example | BadRow],
    tokenizer: Tokenizer,
    loss_on: str,
    max_length: int,
    *,
    unpaired: bool = False,
) -> Iterator[TokenizedRow | BadRow]:
    """Tokenize a stream in order. A chunk is tokenized (in Rust, on all cores) while the next one is rendered.

    A preference gives two documents, the chosen answer and the rejected one, each with the prompt. A row with a label
    gives two as well: see `with_other_answers`. If `unpaired`, a preference is a row with a label for each answer, and
    both have its number.
    """
    return with_other_answers(_tokenize(examples, tokenizer, loss_on, max_length, unpaired), max_length)


def _tokenize(
    examples: Iterable[Example | BadRow], tokenizer: Tokenizer, loss_on: str, max_length: int, unpaired: bool
) -> Iterator[TokenizedRow | BadRow]:
    ready = _render(examples, tokenizer, loss_on, unpaired)
    with ThreadPoolExecutor(1, "dualtune-tokenize") as pool:
        waiting: tuple[list[_Ready | BadRow], Future[list[Tokens]]] | None = None
        while chunk := list(islice(ready, ENCODE_ROWS)):
            texts = [text for row in chunk if isinstance(row, _Ready) for text in row.rendered]
            encoding = pool.submit(_encode, texts, tokenizer)
            if waiting:
                yield from _finish(*waiting, tokenizer, loss_on, max_length)
            waiting = chunk, encoding
        if waiting:
            yield from _finish(*waiting, tokenizer, loss_on, max_length)


def _render(
    examples: Iterable[Example | BadRow], tokenizer: Tokenizer, loss_on: str, unpaired: bool
) -> Iterator[_Ready | BadRow]:
    number = 0
    for example in examples:
        if isinstance(example, BadRow):
            yield example
            continue
        interrupt.poll()
        # Of every other pair the undesirable answer comes first, so that it is half of what `with_other_answers` takes.
        units = judged(example)[:: -1 if number % 2 else 1] if unpaired else (example,)
        try:
            rendered = [tuple(render_example(answer, tokenizer, loss_on) for answer in answers(unit)) for unit in units]
        except RowError as reason:
            yield BadRow(example.path, example.line, str(reason))
            continue
        if example.rejected is not None and len({text.text for texts in rendered for text in texts}) == 1:
            yield BadRow(example.path, example.line, EQUAL_TEXTS)
            continue
        yield from (_Ready(unit, texts, number) for unit, texts in zip(units, rendered, strict=True))
        number += 1


def _encode(rows: Sequence[Rendered], tokenizer: Tokenizer) -> list[Tokens]:
    # A rendered chat already contains its special tokens.
    encoded: dict[int, Tokens] = {}
    for is_chat, is_masked in product((True, False), repeat=2):
        some = [i for i, row in enumerate(rows) if (row.is_chat, row.masked is not None) == (is_chat, is_masked)]
        encode = tokenizer.control_tokens.encode_batch if is_masked else tokenizer.encode_batch
        texts = [rows[i].masked or rows[i].text for i in some]
        encoded.update(zip(some, encode(texts, special=not is_chat) if some else (), strict=True))
    return [encoded[i] for i in range(len(rows))]


def _finish(
    chunk: Sequence[_Ready | BadRow],
    encoding: Future[list[Tokens]],
    tokenizer: Tokenizer,
    loss_on: str,
    max_length: int,
) -> Iterator[TokenizedRow | BadRow]:
    encoded = iter(encoding.result())
    for row in chunk:
        if isinstance(row, BadRow):
            yield row
            continue
        tokens = [_with_mask(rendered, *next(encoded), tokenizer) for rendered in row.rendered]
        # What a person should know of the row, before truncation.
        notices = frozenset[str]().union(
            *(_notices(*part, tokenizer, loss_on) for part in zip(row.rendered, tokens, strict=True))
        )
        state, documents = _fitted(tokens, max_length, split=row.example.is_text)
        first, lengths = row.rendered[0], tuple(len(ids) for ids, _ in tokens)
        control = next(filter(None, (rendered.control_token for rendered in row.rendered)), None)
        yield TokenizedRow(
            first.path, first.line, row.number, lengths, state, documents, len(tokens), row.example.label, control,
            notices,
        )  # fmt: skip


def _notices(rendered: Rendered, tokens: Tokens, tokenizer: Tokenizer, loss_on: str) -> frozenset[str]:
    """Return the kinds of remarks on a text: a turn without an end, a text without a beginning."""
    notices, stop = rendered.notices, tokenizer.stop_text
    has_ends = stop and all(rendered.text.endswith(stop, 0, end) for _, end in rendered.ranges)
    has_ends = has_ends or _earlier_end(*tokens, tokenizer.stop_ids)
    if loss_on != "all" and rendered.is_chat and not has_ends:
        notices |= {NO_END}
    if not rendered.is_chat and tokenizer.bos_id not in (None, *tokens[0][:1].tolist()):
        notices |= {NO_BOS}
    if not rendered.is_chat and (mark := next((m for m in tokenizer.foreign_marks if m in rendered.text), None)):
        notices |= {f"{FOREIGN}: {mark}"}
    return notices


def with_other_answers(rows: Iterable[TokenizedRow | BadRow], max_length: int) -> Iterator[TokenizedRow | BadRow]:
    """Add to each answer with a label its prompt with the answer of the next such row; the last row gets the first's.

    Such an answer says nothing about the prompt, so its log-probabilities estimate how far the model has moved from the
    reference in general (KTO: Ethayarajh et al., arXiv 2402.01306, section 4.1). All other rows pass unchanged.
    """
    first: TokenizedRow | None = None
    waiting: list[TokenizedRow | BadRow] = []  # the answers with a label of one row, and what came after them
    for row in rows:
        if not (isinstance(row, TokenizedRow) and row.label and row.documents):
            if waiting:
                waiting.append(row)
            else:
                yield row
            continue
        first = first or row
        if waiting and isinstance(waiting[0], TokenizedRow) and waiting[0].number == row.number:
            waiting.append(row)
            continue
        yield from _with_other(waiting, row, max_length)
        waiting = [row]
    if waiting:
        assert first is not None
        yield from _with_other(waiting, first, max_length)


def _with_other(
    waiting: Sequence[TokenizedRow | BadRow], other: TokenizedRow, max_length: int
) -> Iterator[TokenizedRow | BadRow]:
    for row in waiting:
        if not (isinstance(row, TokenizedRow) and row.label and row.documents):
            yield row
            continue
        (tokens, mask), (others, other_mask) = row.documents[0], other.documents[0]
        start, other_start = (int(np.flatnonzero(targets)[0]) for targets in (mask, other_mask))
        mixed = np.concatenate([tokens[:start], others[other_start:]])[:max_length]
        mixed_mask = np.concatenate([mask[:start], other_mask[other_start:]])[:max_length]
        # Without a prompt, an answer of one token has nothing before it that could predict it.
        documents = [row.documents[0], (mixed, mixed_mask) if mixed_mask[1:].any() else row.documents[0]]
        yield replace(row, documents=documents, answers=2)


def _with_mask(row: Rendered, tokens: np.ndarray, offsets: np.ndarray, tokenizer: Tokenizer) -> Tokens:
    """Return (token ids, loss mask), with an end token added where the model should learn to stop."""
    tokens, offsets = _cut_at_borders(row, tokens, offsets, tokenizer)
    starts, ends = offsets[:, 0], offsets[:, 1]
    weights = row.weights or [True] * len(row.ranges)
    mask = np.zeros(len(tokens), bool if row.weights is None else np.float32)
    for (start, end), weight in zip(row.ranges, weights, strict=True):
        inside = (starts < end) & (ends > start)
        mask[inside] = weight
        after = int(np.flatnonzero(inside)[-1]) + 1 if inside.any() else len(tokens)
        # A turn's end token is a target too, even if the template's generation block ends before it.
        if after < len(tokens) and int(tokens[after]) in tokenizer.stop_ids and starts[after] == end:
            mask[after] = weight
    # Without an end token the model would never learn to stop.
    end_id = tokenizer.end_id if row.is_chat else tokenizer.eos_id
    if row.ranges and row.ranges[-1][1] >= len(row.text.rstrip()) and end_id is not None and len(tokens):
        last = int(np.flatnonzero(mask)[-1]) if mask.any() else len(tokens) - 1
        is_prompt = row.ranges[-1][0] == row.ranges[-1][1]
        if is_prompt or int(tokens[last]) not in tokenizer.special_ids:
            tokens = np.append(tokens[: last + 1], np.int32(end_id))
            mask = np.append(mask[: last + 1], mask.dtype.type(weights[-1]))
    return tokens, mask


def _earlier_end(tokens: np.ndarray, mask: np.ndarray, stop_ids: frozenset[int]) -> bool:
    """Return whether each run of targets but the last ends with a stop token, or with a few more behind one."""
    trained = np.flatnonzero(mask)
    ends: list[int] = trained[:-1][np.diff(trained) > 1].tolist()
    return all(not stop_ids.isdisjoint(tokens[max(0, end + 1 - END_TOKENS) : end + 1].tolist()) for end in ends)


def _cut_at_borders(row: Rendered, tokens: np.ndarray, offsets: np.ndarray, tokenizer: Tokenizer) -> Tokens:
    """Retokenize the text split at the range borders if a token crosses one; otherwise return the tokens unchanged.

    They also stay unchanged if splitting changes the decoded text (a tokenizer that adds a space before every piece).
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    borders = np.array(sorted({at for target in row.ranges for at in target}))[:, None]
    cuts: list[int] = borders[((starts < borders) & (borders < ends)).any(1), 0].tolist()
    if not cuts:
        return tokens, offsets
    edges = [0, *cuts, len(row.text)]
    text, encode = row.text, tokenizer.encode_batch
    if row.masked is not None:
        text, encode = row.masked, tokenizer.control_tokens.encode_batch
    pieces = encode([text[a:b] for a, b in pairwise(edges)], special=False)
    written = np.flatnonzero(starts < ends)  # tokens that the tokenizer adds (BOS) cover no characters
    first, after = int(written[0]), int(written[-1]) + 1
    cut = np.concatenate([tokens[:first], *(ids for ids, _ in pieces), tokens[after:]])
    if tokenizer.decode(cut.tolist()) != tokenizer.decode(tokens.tolist()):
        return tokens, offsets
    moved = [piece + at for (_, piece), at in zip(pieces, edges, strict=False)]
    return cut, np.concatenate([offsets[:first], *moved, offsets[after:]])


def _fitted(texts: Sequence[Tokens], max_length: int, *, split: bool) -> tuple[State, list[Tokens]]:
    """Return the documents of a row. Of a preference both answers are dropped if one has no target, or if they differ
    only behind `max_length`."""
    # Nothing precedes the first token, so it cannot be predicted.
    if not all(mask[1:].any() for _, mask in texts):
        return State.NO_TARGET, []
    if all(len(tokens) <= max_length for tokens, _ in texts):
        return State.WHOLE, [*texts]
    if split:
        # Windows overlap by one token, so that each token but the first is a target exactly once.
        ((tokens, mask),) = texts
        starts = range(0, len(tokens) - 1, max_length - 1)
        return State.SPLIT, [(tokens[at : at + max_length], mask[at : at + max_length]) for at in starts]
    documents = [(tokens[:max_length], mask[:max_length]) for tokens, mask in texts]
    has_difference = len(texts) == 1 or not np.array_equal(documents[0][0], documents[1][0])
    if not (has_difference and all(mask[1:].any() for _, mask in documents)):
        return State.TOO_LONG, []
    return State.CUT, documents
