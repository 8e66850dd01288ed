"""What an assistant says in a row and the chat template leaves out, so that it is never learned.

Templates drop reasoning that they do not know, cut content at `</think>`, or write a turn otherwise than the generation
prompt will ask for it. The rows are counted by kind. Some kinds are the design of a template, and are only told; the
loss of what a turn consists of is an error above a share of the rows (`data.on_lost_text`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from typing import Any, cast

from dualtune.data.chat.conversations import Message
from dualtune.data.chat.notices import sentence
from dualtune.data.chat.row_values import KEYS_OF_REASONING
from dualtune.errors import DataError

MOST_LOST = 0.05  # the share of the rows of a source that may lose text of a kind in LOST
THOUGHT_END = "</think>"  # in content: what some templates leave out, with all before it
CONTENT, THOUGHT, CALLS = "content", "content_thought", "tool_calls"
EARLIER, CONTEXT, PROMPT, UNEVEN, NO_END = (
    "earlier_reasoning", "untrained_content", "generation_prompt", "uneven_start", "no_end_token"
)  # fmt: skip
# Kinds are keys in `--json`, so these words stay.
LOST = {key: f"{key} is not in the text of a trained turn" for key in (CONTENT, *KEYS_OF_REASONING, CALLS)} | {
    THOUGHT: f"the reasoning in content, up to {THOUGHT_END}, is not in the text of a trained turn"
}
TOLD = {
    EARLIER: "reasoning is left out of answers before the last question, and only the rest of them is learned",
    CONTEXT: "content of an answer that is not trained on is not in the text",
    PROMPT: "the generation prompt is not in the text before a trained turn, so an answer will begin otherwise than in "
    "the training; data.template_variables may turn that off",
    UNEVEN: "some trained turns begin with text of the template, such as an empty thought, that others do not have",
    NO_END: "a trained turn has no end token, because the template writes none when others follow",
}


def lost_in(message: Message, turn: str, *, is_earlier: bool) -> set[str]:
    """Return the kinds of what a trained message says that is not in its turn of the text.

    `is_earlier`: a question follows, before which many templates leave out reasoning.
    """
    before, end, answer = message.content.rpartition(THOUGHT_END)
    said = {CONTENT: answer, THOUGHT: before.replace("<think>", "") if end else ""}
    key = next((key for key in KEYS_OF_REASONING if message.extra.get(key) is not None), None)
    if key is not None:
        said[key] = "\n".join(_leaves(message.extra[key]))
    lost: set[str] = set()
    for kind, text in sorted(said.items(), key=lambda item: -len(item[1])):  # a short text may be a part of a long one
        rest = _without(turn, text)
        if rest is None:
            lost.add(EARLIER if is_earlier and kind != CONTENT else kind)
        else:
            turn = rest
    return lost


def is_missing_call(message: Message, turn: str) -> bool:
    """Return whether a name or an argument of the message's tool calls is not in its turn."""
    calls: Any = message.extra.get("tool_calls") or ()
    return any(not is_written(leaf, turn) for call in calls for leaf in _leaves(call.get("function", call)))


def is_uneven(turns: Sequence[tuple[Message, str]]) -> bool:
    """Return whether some plain answers have text of the template before their content that others do not have."""
    heads = {
        "".join(turn.partition(content)[0].split())
        for message, turn in turns
        if (content := message.content.strip())
        and content in turn
        and not {*KEYS_OF_REASONING, CALLS} & {*message.extra}
    }
    return len(heads) > 1


def sentences(counts: Mapping[str, int], num_rows: int) -> list[str]:
    """Say how many rows there are of each kind, those of `chat/notices.py` last."""
    texts = LOST | TOLD | {kind: text for kind in sorted(counts) if (text := sentence(kind))}
    return [f"{counts[kind]:,} of {num_rows:,} rows: {text}" for kind, text in texts.items() if counts.get(kind)]


def check_lost_text(counts: Mapping[str, int], num_rows: int, name: str, *, accept: bool) -> None:
    """Raise DataError if more than MOST_LOST of the rows lose text of a kind in LOST."""
    lost = {kind: number for kind, number in counts.items() if kind in LOST and number > MOST_LOST * num_rows}
    if lost and not accept:
        column = (
            " (data.columns: {reasoning: null} leaves a column of it out)" if {*KEYS_OF_REASONING} & {*lost} else ""
        )
        raise DataError(
            f"{name}: {'; '.join(sentences(lost, num_rows))}. The chat template does not write it, so it would not be "
            f"learned; allowed: {MOST_LOST:.0%} of the rows. Use a data.template that writes it, remove it from the "
            f"rows{column}, or set data.on_lost_text: accept"
        )


def _without(turn: str, text: str) -> str | None:
    """Return a turn without this text, or None if the text is not in it. Whitespace and case may differ."""
    if (wanted := text.strip()) in turn:
        return turn.replace(wanted, "\0", 1) if wanted else turn
    wanted, turn = ("".join(each.split()).casefold() for each in (text, turn))
    return turn.replace(wanted, "\0", 1) if wanted in turn else None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys, texts, numbers and booleans of a JSON value; arguments may be JSON in a text."""
    if isinstance(value, Mapping):
        for key, item in cast(Mapping[Any, Any], value).items():
            if key == "arguments" and isinstance(item, str):
                item = _parsed(item)
            yield from () if key in ("name", "arguments") else (key,)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[Any], value):
            yield from _leaves(item)
    elif value is not None:
        yield value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_written(leaf: Any, turn: str) -> bool:
    """Return whether a text, number or boolean is in a turn: as it is, or as JSON, Python or HTML writes it."""
    if not isinstance(leaf, str):
        return any(form in turn for form in (json.dumps(leaf), str(leaf)))
    text = leaf.strip()
    if text in turn:
        return True
    ascii, plain = (json.dumps(text, ensure_ascii=each)[1:-1] for each in (True, False))
    forms: Collection[str] = (ascii, plain, repr(text)[1:-1], escape(text), plain.replace("/", "\\/"))
    return any(form in turn for form in forms) or _without(turn, text) is not None
