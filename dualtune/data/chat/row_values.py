"""Columns and values of rows: which column holds a key of the format, and texts, lists and objects, read with errors
that say where they are.

A key has the column that `data.columns` names, or one of its usual names; reasoning has one whose name says so.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from dualtune.base.errors import DataError
from dualtune.data.sources.rows import RowError

# ----------------------------------------------------------------------------------------------------------------------
# What of a row is read otherwise than it stands there, or not at all: kinds of notices, counted and told by kind.
#
# A kind is one of the words below, or, with the name of a column, `unread_column: context`. The counts of all rows
# are shown by `dualtune check-data`, `dualtune preview` and at the start of a run.

# Kinds are keys in `--json`, so these words stay.
JOINED, KEPT, FOLDED, SCALAR, NO_BOS = "joined_turns", "kept_turns", "folded_system", "scalar_text", "no_bos"
NULLS, PARSED, ALTERNATING = "dropped_nulls", "parsed_messages", "alternating_texts"
EQUAL_SCORES, REVERSED_SCORES = "equal_scores", "reversed_scores"
BLANK, TOOLS_TWICE = "blank_question", "tools_twice"
UNREAD, INDEX_COLUMN, UNREAD_LABEL = "unread_column", "index_column", "unread_label"  # with the name of the column
FOREIGN = "foreign_mark"  # with the mark
TEXTS = {
    JOINED: "turns of one role in a row are joined with a blank line (data.consecutive)",
    KEPT: "turns of one role in a row stay apart (data.consecutive)",
    FOLDED: "the chat template writes no system message, so it stands before the question (data.system)",
    SCALAR: "a number, true or false in place of a text is read as its JSON text",
    PARSED: "texts that are lists of messages as JSON are read as these messages",
    ALTERNATING: "texts without a role are read as those of user and assistant in turn",
    NULLS: "nulls in tool schemas, arguments or results, as tables add them, are left out",
    EQUAL_SCORES: "the scores say that the chosen and the rejected answer are equally good",
    REVERSED_SCORES: "the scores say that the rejected answer is better than the chosen one",
    BLANK: "a user message is blank, so an answer to nothing is learned; remove the row if a question is missing",
    TOOLS_TWICE: "the system message lists the tools that the row has too, so templates that write tools list them "
    "twice; data.columns: {{tools: null}} leaves those of the row out",
    FOREIGN: "plain text has {}, a mark of chats that is no token of this tokenizer, so it is learned as ordinary "
    "text; rows with messages get the marks of the model's own template",
    NO_BOS: "plain text without the tokenizer's BOS token, which the tokenizer names and does not add",
    UNREAD: "the column '{}' is not read; data.columns names columns to read, or remove it",
    UNREAD_LABEL: "the column '{}' may say which answers are good and is not read; data.format: unpaired_preference "
    "reads it, and data.columns: {{label: null}} says that it does not",
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
# What a task asks for or is about; its reasoning is that of the answer.
OF_TASKS = frozenset({
    "article", "choices", "code", "explanation", "highlights", "hypothesis", "options", "premise", "problem", "reply",
    "snippet", "solution", "solutions", "sql", "story", "summary", "targets", "translation",
})  # fmt: skip
# Words of names of the class of a text, which plain text does not learn.
CLASSES = frozenset({"class", "label", "labels", "sentiment", "target"})
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
    fields: Mapping[str, Any],
    read: Collection[str],
    texts: Iterable[str],
    reasoning: Iterable[str] = (),
    *,
    is_plain: bool = False,
) -> set[str]:
    """Return the kinds of the columns that are not in `read` and seem to hold a part of the conversation.

    `texts` and `reasoning` are what was read: a column that only repeats them, or that is all the texts with a frame,
    loses nothing. The class of a plain text (`is_plain`) is one of these columns, whatever it holds.
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
        words = words_of(name)
        if is_plain and words & CLASSES and value is not None:
            kinds.add(f"{UNREAD}: {name}")
            continue
        is_content = bool(words & (CONTENT | OF_TASKS)) and not words & ABOUT
        leaves = list(_texts_of(value)) if is_content or _holds_messages(value) else []
        if not leaves:
            continue
        # The conversation is joined for the first such column only, because most rows have none.
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


# ----------------------------------------------------------------------------------------------------------------------
SHOWN_CHARACTERS = 60
SHOWN_KEYS = 10
# Keys for the reasoning of an answer. Whichever a row uses, the template gets it under the first two.
KEYS_OF_REASONING = ("reasoning_content", "thinking", "reasoning")
Columns = Mapping[str, str | None]  # data.columns: from our key to the file's; null leaves a key out
REASONING = "reasoning"  # the key of the reasoning of an answer in a column of its own
SYSTEM_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({"system": ("system_prompt", "system_message")})
# If a row has several columns of reasoning, the first of these is read; other names only where they are the only one.
_NAMES = (*KEYS_OF_REASONING, "cot", "chain_of_thought", "rationale", "thought", "thoughts")
# Words for what else a column holds: cot_answer is an answer, reasoning_prompt a prompt, and both stay unread.
_OTHER = ABOUT | (CONTENT - REASONING_WORDS - {"content", "text"})


def text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{at}: got {type(value).__name__}, a string is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # valid in JSON, but no tokenizer accepts it
        half = value[error.start].encode("unicode-escape").decode()
        raise RowError(f"{at}: contains an unpaired surrogate ({half}), which is not valid text") from error
    return value


def is_scalar(value: Any) -> bool:
    """Return whether a value is a number or a boolean that JSON has."""
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def from_json(value: Any, at: str) -> Any:
    """Parse a string as JSON and return any other value unchanged. CSV and Parquet hold lists and objects as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise RowError(f"{at}: got a string that is not JSON: {error.msg} at character {error.pos + 1}") from error
    except ValueError as error:  # a number with thousands of digits
        raise RowError(f"{at}: got a string that is not usable JSON: {error}") from error


def as_list(value: Any, at: str) -> list[Any]:
    value = from_json(value, at)
    if not isinstance(value, list):
        raise RowError(f"{at}: got {type(value).__name__}, a list is needed")
    return cast(list[Any], value)


def as_object(value: Any, at: str) -> dict[str, Any]:
    value = from_json(value, at)
    if not isinstance(value, dict):
        raise RowError(f"{at}: got {type(value).__name__}, an object is needed")
    return cast(dict[str, Any], value)


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys with null: tables have a value for every column."""
    return {key: value for key, value in fields.items() if value is not None}


def needed(fields: Mapping[str, Any], key: str, at: str) -> Any:
    if fields.get(key) is None:
        raise RowError(f"{at}: has no '{key}'; its keys are: {listed(fields)}")
    return fields[key]


def shown(value: Any) -> str:
    """Format a value for an error message: short, on one line, printable."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def listed(names: Iterable[Any]) -> str:
    """Format the first names for an error message."""
    printable = [repr(str(name))[1:-1] for name in names]
    more = ["…"] if len(printable) > SHOWN_KEYS else []
    return ", ".join(printable[:SHOWN_KEYS] + more) or "(none)"


def check_texts(value: Any, at: str) -> None:
    """Raise RowError for a lone surrogate in any string of a JSON value."""
    for string in strings_in(value):
        text(string, at)


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in cast(Mapping[Any, Any], value).items():
            yield from strings_in(pair)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[Any], value):
            yield from strings_in(item)


# --- columns ---------------------------------------------------------------------------------------------------------


def column_of(
    key: str, keys: Iterable[str], aliases: Mapping[str, tuple[str, ...]], fields: Mapping[str, Any], columns: Columns
) -> str:
    """Return the column of a row that holds a key of its format, or would hold it if it were not left out.

    `keys` are all keys of the format, `aliases` other names of a key, used where a row has none of its own name.
    """
    name = columns.get(key) or key
    mapped = {column for column in columns.values() if column}
    if columns.get(key):
        return name
    if key == REASONING:
        others = (alias for other in keys if other != key for alias in (other, *aliases.get(other, ())))
        return _column_of_reasoning(fields, mapped.union(others)) or name
    if has_value(fields, name):
        return name
    return next((alias for alias in aliases.get(key, ()) if alias not in mapped and has_value(fields, alias)), name)


def has_value(fields: Mapping[str, Any], key: str) -> bool:
    """Return whether a row has a value for a key that may be absent; null, [] and blank text are none."""
    value = fields.get(key)
    return value is not None and value != [] and not (isinstance(value, str) and not value.strip())


# Names of columns in public data sets, the likeliest first, for the suggestion of `data.columns`.
_LIKELY = MappingProxyType({
    "prompt": (
        "prompt", "question", "query", "problem", "instruction", "input", "inputs", "user", "human", "q", "article",
        "document", "dialogue", "text", "premise",
    ),
    "completion": (
        "completion", "response", "answer", "output", "outputs", "targets", "target", "solution", "assistant", "gpt",
        "bot", "chatbot", "reply", "a", "highlights", "summary", "sql", "code", "answers",
    ),
    "context": ("context", "passage"),
})  # fmt: skip
_LIKELY_TEXTS = ("content", "text", "body", "document", "article", "code", "story", "raw_content")


def suggested_columns(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the `data.columns` with which a row of no known format is likely meant; {} if its names do not tell."""
    texts = {
        str(name).strip().lower(): name
        for name, value in fields.items()
        if (isinstance(value, str) and not holds_calls(value)) or is_scalar(value)
    }
    columns: dict[str, str] = {}
    for key, names in _LIKELY.items():
        column = next((texts[name] for name in names if name in texts and texts[name] not in columns.values()), None)
        columns |= {} if column is None else {key: column}
    if {"prompt", "completion"} <= columns.keys():
        return {key: column for key, column in columns.items() if column != key}
    return next(({"text": texts[name]} for name in _LIKELY_TEXTS if name in texts), dict[str, str]())


def holds_calls(value: Any) -> bool:
    """Return whether a value is a list of calls, or one as JSON, as xLAM's data have them."""
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            return False
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    calls = cast(list[Any], value) if isinstance(value, list) else []
    return bool(calls) and all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls)


def in_yaml(name: str) -> str:
    """Return the name of a column as YAML needs it within braces: in quotes, if anything else would change it."""
    return name if _PLAIN_IN_YAML.fullmatch(name) else json.dumps(name, ensure_ascii=False)


_PLAIN_IN_YAML = re.compile(r"[^\W\d][\w.-]*(?: [\w.-]+)*")


def has_likely_answer(fields: Mapping[str, Any]) -> bool:
    """Return whether a column has a usual name of an answer, and a value."""
    return any(str(name).strip().lower() in _LIKELY["completion"] and has_value(fields, name) for name in fields)


def left_out(columns: Columns) -> set[str]:
    return {key for key, column in columns.items() if column is None}


def check_columns(
    columns: Columns, every: Iterable[str], owner: str, keys: Iterable[str], needed: Iterable[str] = ()
) -> None:
    """Check data.columns against the keys of a format, or of all formats (`owner` says which).

    Raises DataError for a key that no format has (`every`), a column for a key that is not in `keys`, or null for one
    that is `needed`.
    """
    without = left_out(columns)
    if unknown := sorted(columns.keys() - {*every}) or sorted(columns.keys() - without - {*keys}):
        raise DataError(f"data.columns: got '{unknown[0]}', {owner}: {', '.join(dict.fromkeys(keys))}")
    if missing := sorted(without & {*needed}):
        raise DataError(f"data.columns: got null for '{missing[0]}', which {owner.removesuffix(' has')} needs")


def _column_of_reasoning(fields: Mapping[str, Any], others: Collection[str]) -> str | None:
    """Return the column with the reasoning of an answer, going by its name; None if there is none, or several."""
    names: list[str] = []
    for name, value in fields.items():
        words = words_of(name) if isinstance(name, str) else frozenset[str]()  # pyright: ignore[reportUnnecessaryIsInstance]
        texts = cast(list[Any], value) if isinstance(value, list) else [value]
        is_named_so = name not in others and words & REASONING_WORDS and not words & _OTHER
        if is_named_so and all(isinstance(text, str) for text in texts) and any(text.strip() for text in texts):
            names.append(name)
    return next((name for name in _NAMES if name in names), names[0] if len(names) == 1 else None)
