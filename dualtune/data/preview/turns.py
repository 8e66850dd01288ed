"""Split a document's text into its messages, to show it to a person.

The content of each message is found by rendering the conversation again with marks around the contents. The rest is
what the template adds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dualtune.data.chat.conversations import Message
from dualtune.data.chat.formats import Example
from dualtune.data.preview.survey import ShownDocument, ShownToken
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.tokenizer import Tokenizer

# frame: what the template adds; call: an assistant's tool calls; tools: the functions that are offered
Kind = Literal["content", "frame", "call", "tools"]
MARK = "\ue000\ue001\ue000"  # private-use characters; no template handles them specially
HEAD = 64  # characters used to find the text after what the tokenizer puts before it


@dataclass(frozen=True, slots=True)
class TurnPart:
    kind: Kind
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
    after: Kind = "frame"  # kind of the text after the content, up to the end of the turn


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


def _kind_after(message: Message, example: Example) -> Kind:
    if message.extra.get("tool_calls"):
        return "call"
    return "tools" if message.role == "system" and example.tools else "frame"
