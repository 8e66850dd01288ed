"""What of a row is read otherwise than it stands there, or not at all: kinds of notices, counted and told by kind.

A kind is one of the words below, or, with the name of a column, `unread_column: context`. The counts of all rows
are shown by `dualtune check-data`, `dualtune preview` and at the start of a run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

# Kinds are keys in `--json`, so these words stay.
JOINED, KEPT, FOLDED, SCALAR, NO_BOS = "joined_turns", "kept_turns", "folded_system", "scalar_text", "no_bos"
NULLS = "dropped_nulls"
UNREAD, INDEX_COLUMN = "unread_column", "index_column"  # with the name of the column
TEXTS = {
    JOINED: "turns of one role in a row are joined with a blank line (data.consecutive)",
    KEPT: "turns of one role in a row stay apart (data.consecutive)",
    FOLDED: "the chat template writes no system message, so it stands before the question (data.system)",
    SCALAR: "a number, true or false in place of a text is read as its JSON text",
    NULLS: "nulls in tool schemas, arguments or results, as tables add them, are left out",
    NO_BOS: "plain text without the tokenizer's BOS token, which the tokenizer names and does not add",
    UNREAD: "the column '{}' is not read; data.columns names columns to read, or remove it",
    INDEX_COLUMN: "the column '{}' is taken for the row numbers of pandas and is not read",
}
_INDEX_NAMES = ("", "Unnamed: 0", "__index_level_0__")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
# Words of names of columns with the reasoning of an answer.
REASONING_WORDS = frozenset({
    "cot", "rationale", "rationales", "reasoning", "scratchpad", "think", "thinking", "thought", "thoughts",
})  # fmt: skip
CONTENT = REASONING_WORDS | {
    "answer", "answers", "audio", "chat", "chosen", "completion", "content", "context", "contexts", "conversation",
    "conversations", "dialog", "dialogue", "document", "documents", "function", "functions", "history", "image",
    "images", "input", "inputs", "instruction", "instructions", "knowledge", "message", "messages", "output",
    "outputs", "passage", "persona", "prompt", "prompts", "query", "question", "questions", "rejected", "response",
    "responses", "system", "text", "tool", "tools", "turns", "video",
}  # fmt: skip
# Words of names that say something about a text, such as prompt_id, and hold none.
ABOUT = frozenset({
    "budget", "category", "count", "date", "domain", "effort", "hash", "id", "ids", "idx", "index", "key", "lang",
    "language", "len", "length", "level", "mode", "model", "name", "num", "number", "rating", "score", "scores",
    "size", "source", "split", "subset", "tag", "tags", "time", "timestamp", "tokens", "topic", "type", "url",
    "uuid", "version",
})  # fmt: skip


def sentence(kind: str) -> str:
    """Return what a kind means; "" if it is not one of these kinds."""
    word, _, column = kind.partition(": ")
    return TEXTS.get(word, "").format(column)


def unread(
    fields: Mapping[str, Any], read: Collection[str], texts: Iterable[str], reasoning: Iterable[str] = ()
) -> set[str]:
    """Return the kinds of the columns that are not in `read` and seem to hold a part of the conversation.

    `texts` and `reasoning` are what was read: a column that only repeats them, or that is all the texts with a frame,
    is no loss.
    """
    kinds: set[str] = set()
    whole: str | None = None
    parts: list[str] = []
    for name, value in fields.items():
        if name in read or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            continue
        if name in _INDEX_NAMES:
            kinds.add(f"{INDEX_COLUMN}: {name}")
            continue
        leaves = list(_texts_of(value)) if _is_content(name) or _holds_messages(value) else []
        if not leaves:
            continue
        if whole is None:
            parts = [text.strip() for text in texts]
            whole = "\n".join([*parts, *reasoning])
        if all(leaf in whole for leaf in leaves) or all(part in "\n".join(leaves) for part in parts):
            continue
        kinds.add(f"{UNREAD}: {name}")
    return kinds


@functools.lru_cache(maxsize=1024)
def words_of(name: str) -> frozenset[str]:
    """Return the words of a column's name in lower case: {complex, cot} of Complex_CoT."""
    return frozenset(word.lower() for word in _WORD.findall(name.replace("CoT", "Cot")))


def _is_content(name: str) -> bool:
    words = words_of(name)
    return bool(words & CONTENT) and not words & ABOUT


def _holds_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, or one."""
    first = next(iter(cast(list[Any], value)), None) if isinstance(value, list) else value
    return isinstance(first, dict) and ({"role", "content"} <= first.keys() or {"from", "value"} <= first.keys())


def _texts_of(value: Any, key: str = "") -> Iterator[str]:
    """Yield the texts in a value that are not blank, without those that only say who speaks."""
    if isinstance(value, str):
        if value.strip() and key not in ("role", "from"):
            yield value.strip()
    elif isinstance(value, Mapping):
        for name, item in cast(Mapping[Any, Any], value).items():
            yield from _texts_of(item, str(name))
    elif isinstance(value, list | tuple):
        for item in cast(Iterable[Any], value):
            yield from _texts_of(item, key)
