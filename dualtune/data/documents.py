"""Examples to documents: token ids, and for each token whether it is trained on.

The rule: render the whole conversation once, mark the character spans to be learned, tokenize once with offsets. A
token is trained when it holds a character of a span. Nothing is tokenized in pieces, so training sees exactly the
tokens that generation will see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jinja2 import TemplateError

from dualtune import interrupt
from dualtune.config import Config
from dualtune.data.formats import Example, RowError, to_examples
from dualtune.data.readers import raise_problems, read_rows
from dualtune.data.tokenizer import Tokenizer

ENCODE_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Document:
    tokens: np.ndarray  # int32 [T]
    trained: np.ndarray  # bool [T]: this token is a target
    where: str = ""  # path:line of the row

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.trained[1:]))  # nothing precedes the first token, so it cannot be predicted


@dataclass(slots=True)
class Documents:
    """Tokenized rows, and what happened on the way."""

    items: list[Document] = field(default_factory=lambda: [])
    num_rows: int = 0
    num_truncated: int = 0
    num_dropped: int = 0  # nothing trainable was left

    @property
    def num_tokens(self) -> int:
        return sum(len(document.tokens) for document in self.items)

    @property
    def num_targets(self) -> int:
        return sum(document.num_targets for document in self.items)

    def fingerprint(self) -> str:
        """What tells these documents from others: their number, and a hash over tokens and targets in order."""
        digest = hashlib.sha256()
        for document in self.items:
            digest.update(len(document.tokens).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(document.tokens, np.int32).tobytes())
            digest.update(np.packbits(document.trained).tobytes())
        return f"{len(self.items)} documents, sha256 {digest.hexdigest()[:16]}"

    def summary(self) -> str:
        share = self.num_targets / max(1, self.num_tokens)
        text = (
            f"{len(self.items)} documents, {self.num_tokens} tokens, {self.num_targets} of them trained ({share:.0%})"
        )
        if self.num_truncated:
            text += f"; {self.num_truncated} cut to max_length"
        if self.num_dropped:
            text += f"; {self.num_dropped} dropped: no trainable token within max_length"
        return text


def held_out_examples(config: Config) -> tuple[list[Example], list[Example]]:
    """(train, eval) rows of a config. `data.eval` is a file, a share of the training rows, or nothing."""
    examples, held_out = read_examples(config, config.data.train), config.data.eval
    if isinstance(held_out, str):
        return examples, read_examples(config, held_out)
    return split(examples, held_out or 0.0, config.run.seed)


def read_examples(config: Config, path: str) -> list[Example]:
    return to_examples(read_rows(path), config.data.format, config.data.columns)


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Hold out a share of the rows (at least one, if any): a function of the seed and the number of rows alone."""
    num_eval = min(max(1, round(share * len(examples))), len(examples) - 1) if share else 0
    chosen = set(np.random.default_rng([seed, 0]).permutation(len(examples))[:num_eval].tolist())
    kept = [example for i, example in enumerate(examples) if i not in chosen]
    return kept, [examples[i] for i in sorted(chosen)]


def tokenize(examples: Sequence[Example], tokenizer: Tokenizer, loss_on: str, max_length: int) -> Documents:
    """Tokenize examples. DataError with every row that the template refuses or that has no text to learn."""
    result = Documents(num_rows=len(examples))
    problems: list[str] = []
    rendered: list[_Rendered] = []
    for example in examples:
        interrupt.poll()
        try:
            rendered.append(_render(example, tokenizer, loss_on))
        except RowError as reason:
            problems.append(f"{example.where}: {reason}")
    if problems:
        raise_problems(problems, len(examples))
    for start in range(0, len(rendered), ENCODE_ROWS):
        interrupt.poll()
        chunk = rendered[start : start + ENCODE_ROWS]
        special = not chunk[0].is_chat  # one file has one format, so a chunk is all chat or all plain
        encoded = tokenizer.encode_batch([row.text for row in chunk], special=special)
        for row, (tokens, offsets) in zip(chunk, encoded, strict=True):
            _append(result, _document(row, tokens, offsets, tokenizer), max_length)
    return result


@dataclass(frozen=True, slots=True)
class _Rendered:
    text: str
    spans: list[tuple[int, int]]  # characters to learn
    is_chat: bool
    where: str


def _render(example: Example, tokenizer: Tokenizer, loss_on: str) -> _Rendered:
    if tokenizer.template is not None and example.messages:
        return _render_chat(example, tokenizer, loss_on)
    if example.completion is None or example.prompt is None:
        raise RowError(
            "the tokenizer has no chat template, and a conversation needs one. Set data.template to a Jinja file"
        )
    text = example.prompt + example.completion
    return _Rendered(
        text, [(0 if loss_on == "all" else len(example.prompt), len(text))], is_chat=False, where=example.where
    )


def _render_chat(example: Example, tokenizer: Tokenizer, loss_on: str) -> _Rendered:
    """Spans by prefixes: a turn is what the template adds to everything before it, verified on the rendered text."""
    messages = example.messages
    try:
        text = tokenizer.render(messages)
        # The newline that a template puts behind the end-of-turn token is never generated.
        if loss_on == "all":
            return _Rendered(text, [(0, len(text.rstrip()))], is_chat=True, where=example.where)
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        spans: list[tuple[int, int]] = []
        for i in turns[-1:] if loss_on == "last" else turns:
            before = tokenizer.render(messages[:i], add_generation_prompt=True)
            through = tokenizer.render(messages[: i + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise RowError(
                    f"message {i + 1}: the chat template rewrites earlier turns, so the assistant's part cannot be "
                    "located. Use data.loss_on: last or all, or another data.template"
                )
            spans.append((len(before), len(through.rstrip())))
    except TemplateError as error:
        raise RowError(f"the chat template refuses this conversation: {error}") from error
    return _Rendered(text, spans, is_chat=True, where=example.where)


def _document(row: _Rendered, tokens: np.ndarray, offsets: np.ndarray, tokenizer: Tokenizer) -> Document:
    trained = np.zeros(len(tokens), bool)
    for start, end in row.spans:
        trained |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    # Without an end token the model would never learn to stop.
    if row.spans[-1][1] >= len(row.text.rstrip()) and tokenizer.eos_id is not None and len(tokens):
        last = int(np.flatnonzero(trained)[-1]) if trained.any() else len(tokens) - 1
        if int(tokens[last]) not in tokenizer.special_ids:
            tokens = np.append(tokens[: last + 1], np.int32(tokenizer.eos_id))
            trained = np.append(trained[: last + 1], True)
    return Document(tokens, trained, row.where)


def _append(result: Documents, document: Document, max_length: int) -> None:
    if len(document.tokens) > max_length:
        document = Document(document.tokens[:max_length], document.trained[:max_length], document.where)
        result.num_truncated += 1
    if document.num_targets:
        result.items.append(document)
    else:
        result.num_dropped += 1
