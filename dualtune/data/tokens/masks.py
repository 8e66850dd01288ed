"""Find the target characters: render the conversation once, and locate the assistant turns in the text.

A turn is what the assistant generates: from the end of the generation prompt through the end-of-turn text. Templates
differ, so there are three methods to find it, the most reliable first, and each is verified on the rendered text:

1. generation markers in the template;
2. prefixes: the turn is what the template adds to the conversation before it. If it renders the last turn differently
   (Qwen3 writes a think block there), the added text must end with the turn's text in the conversation. If the
   generation prompt is not in the text (Gemma 4 ends it with an empty thought), the turn begins where the head of a
   rendered turn ends;
3. a sentinel around the message's content, or in its tool calls, for templates that rewrite earlier turns when later
   ones follow (Mistral).

The end of a turn is that of the rendered turn, whatever the generation prompt is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, cast

from dualtune.base.errors import DataError
from dualtune.data.chat.call_notations import common_prefix
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example
from dualtune.data.chat.row_values import FOLDED, KEYS_OF_REASONING, sentence
from dualtune.data.chat.template import TEMPLATES_WITH_TOOLS
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.tokenizer import Tokenizer

Range = tuple[int, int]  # of characters: start, end
HEAD = 64  # characters used to search for the start of a turn
NO_TEMPLATE = "the tokenizer has no chat template, and a conversation needs one. Set data.template to a Jinja file"
_UNFINISHED_MARK = re.compile(r"[<\[][^<>\[\]]*\Z")


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of an example and its target characters: sorted, disjoint ranges, possibly none."""

    text: str
    ranges: list[Range]
    weights: list[float] | None  # loss weights of the ranges; None: all are 1
    is_chat: bool  # the text already contains its special tokens
    path: str
    line: int
    control_token: str | None = None  # the first one in the content…
    masked: str | None = None  # …and the text for `ControlTokens.encode_batch`; None: `text` is encoded
    notices: frozenset[str] = frozenset()  # kinds in LOST and TOLD


def render_example(example: Example, tokenizer: Tokenizer, loss_on: str) -> Rendered:
    """Render an example for `loss_on`: "assistant" (every assistant turn), "last" (the last one), or "all".

    An assistant message with `train` false is never trained on; a message weight is its loss weight. Raises RowError if
    the template rejects the conversation or does not show its tools, if a turn cannot be located, or if a control token
    in the content is not allowed.
    """
    is_chat = tokenizer.template is not None and bool(example.messages)
    if example.is_prompt:
        return _asked(example, tokenizer, is_chat=is_chat)
    notices: frozenset[str] = frozenset()
    if is_chat:
        chat = _Chat(example, tokenizer)
        text, ranges, weights = chat.text, *chat.targets(loss_on)
        notices = chat.notices(loss_on)
        control = tokenizer.masked_chat(chat.messages, text, tools=example.tools)
    elif example.completion is not None:
        prompt = example.prompt or ""
        text = prompt + example.completion
        ranges, weights = [(0 if loss_on == "all" or example.is_text else len(prompt), len(text))], [1.0]
        if example.messages:  # only a chat template writes the reasoning of the answer
            notices = frozenset(lost_in(example.messages[-1], example.completion, is_earlier=False))
        control = tokenizer.masked_text(text)
    else:
        raise RowError(NO_TEMPLATE)
    filled = [(target, weight) for target, weight in zip(ranges, weights, strict=True) if target[0] < target[1]]
    ranges, weights = [target for target, _ in filled], [weight for _, weight in filled]
    some = weights if any(weight != 1 for weight in weights) else None
    return Rendered(text, ranges, some, is_chat, example.path, example.line, *control, notices | example.notices)


def _asked(example: Example, tokenizer: Tokenizer, *, is_chat: bool) -> Rendered:
    """Render a prompt alone: its only target is the end of an answer that is not there."""
    if is_chat:
        messages, text, _ = tokenizer.render_folded(example.messages, tools=example.tools, add_generation_prompt=True)
        control = tokenizer.masked_chat(messages, text, tools=example.tools, add_generation_prompt=True)
    elif example.prompt is None:
        raise RowError(NO_TEMPLATE)
    else:
        text = example.prompt
        control = tokenizer.masked_text(text)
    end = [(len(text), len(text))]
    return Rendered(text, end, None, is_chat, example.path, example.line, *control, example.notices)


class _Chat:
    """A rendered conversation, and the search for its turns."""

    def __init__(self, example: Example, tokenizer: Tokenizer) -> None:
        self._tools, self._tokenizer = example.tools, tokenizer
        self.messages, self.text, marked = tokenizer.render_folded(example.messages, tools=example.tools)
        self._is_folded = self.messages is not example.messages
        _check_names(_tool_names(example.tools), self.text, "tools")
        self._check_results()
        self._turns = [i for i, message in enumerate(self.messages) if message.role == "assistant"]
        self._marked: dict[int, Range] | None = None
        self._located: dict[int, Range] = {}  # turns that were located
        if tokenizer.template is not None and tokenizer.template.marks_turns:
            if len(marked) != len(self._turns):
                raise RowError(
                    f"the chat template marks {len(marked)} turns as generated, but the conversation has "
                    f"{len(self._turns)} assistant messages. Use another data.template"
                )
            self._marked = dict(zip(self._turns, marked, strict=True))

    def _check_results(self) -> None:
        """Raise RowError if the result of a tool is not in the text: the answer would be learned without it."""
        for number, message in enumerate(self.messages, start=1):
            if message.role == "tool" and not is_written(message.content, self.text):
                raise RowError(
                    f"message {number}: the chat template does not write the result of a tool. {TEMPLATES_WITH_TOOLS}"
                )

    def targets(self, loss_on: str) -> tuple[list[Range], list[float]]:
        """Return the target ranges and their loss weights."""
        if loss_on == "all":
            return self._all_text()
        trained = self._trained(loss_on)
        return [self._turn(i) for i in trained], [self.messages[i].weight for i in trained]

    def notices(self, loss_on: str) -> frozenset[str]:
        """Return the kinds of text that the loss leaves out; call it after `targets`."""
        trained = {i: self._located.get(i) for i in self._trained(loss_on)}
        turns = {i: self.text[slice(*turn)] if turn else self.text for i, turn in trained.items()}
        question = max((i for i, message in enumerate(self.messages) if message.role == "user"), default=-1)
        kinds = {FOLDED} if self._is_folded else set[str]()
        for i, turn in turns.items():
            message = self.messages[i]
            kinds |= lost_in(message, turn, is_earlier=i < question)
            if is_missing_call(message, turn):
                kinds.add(CALLS)
            if (place := trained[i]) and self.messages[i - 1].role == "user" and not self._is_prompted(place[0]):
                kinds.add(PROMPT)
        context = (self.messages[i] for i in self._turns if i not in turns)
        if any(CONTENT in lost_in(message, self.text, is_earlier=True) for message in context):
            kinds.add(CONTEXT)
        if loss_on != "all" and is_uneven([(self.messages[i], turn) for i, turn in turns.items()]):
            kinds.add(UNEVEN)
        return frozenset(kinds)

    def _trained(self, loss_on: str) -> list[int]:
        turns = self._turns[-1:] if loss_on == "last" else self._turns
        return [i for i in turns if self.messages[i].train]

    def _is_prompted(self, start: int) -> bool:
        """Return whether the generation prompt ends where a turn starts, or in the turn."""
        prompt = self._tokenizer.generation_prompt
        at = self.text.rfind(prompt, 0, start + len(prompt))
        return at >= 0 and at + len(prompt) >= start

    def _all_text(self) -> tuple[list[Range], list[float]]:
        """Return all text except excluded turns. A turn with a weight other than 1 is a separate range."""
        ranges: list[Range] = []
        weights: list[float] = []
        start = 0
        for i in self._turns:
            message = self.messages[i]
            if message.train and message.weight == 1:
                _check_names(_call_names(message), self.text, "tool calls")
                continue
            turn = self._turn(i)
            ranges.append((start, turn[0]))
            weights.append(1.0)
            if message.train:
                ranges.append(turn)
                weights.append(message.weight)
            start = turn[1]
        return [*ranges, (start, _end(self.text, self.messages[-1].content))], [*weights, 1.0]

    def _turn(self, i: int) -> Range:
        """Return the range of assistant message `i`."""
        turn = self._with_end(self._marked[i]) if self._marked is not None else self._by_prefix(i)
        turn = turn or self._by_own_text(i) or self._by_sentinel(i)
        if turn is None:
            choices = "all" if i == self._turns[-1] else "last or all"
            raise RowError(
                f"message {i + 1}: the chat template writes this turn differently when others follow, so it cannot be "
                f"located in the text. Set data.loss_on to {choices}, use another data.template, or add "
                "{% generation %} markers to it"
            )
        _check_names(_call_names(self.messages[i]), self.text[turn[0] : turn[1]], "tool calls")
        self._located[i] = turn
        return turn

    def _by_prefix(self, i: int) -> Range | None:
        rendered = self._rendered_until(i)
        if rendered is None or not self.text.startswith(rendered[1][: rendered[0]]):  # the text begins differently
            return None
        start, text = rendered[0], rendered[1][rendered[0] :]  # the turn, if no other follows
        content = self.messages[i].content
        if not self.text.startswith(text, start):
            contents = dict.fromkeys((content.strip(), content.rpartition(THOUGHT_END)[2].strip()))
            text = next((suffix for part in contents if (suffix := _suffix_at(self.text, start, text, part))), "")
        return (start, start + _end(text, content)) if text else None

    def _rendered_until(self, i: int) -> tuple[int, str] | None:
        """Render the conversation through message `i`; return where that message starts, and the whole text."""
        try:
            before = self._render(self.messages[:i], add_generation_prompt=True)
            through = self.text if i + 1 == len(self.messages) else self._render(self.messages[: i + 1])
            start = len(before) if through.startswith(before) else self._head(i, before, through)
        except RowError:  # some templates reject a part of a conversation that they accept as a whole
            return None
        return None if start is None else (start, through)

    def _head(self, i: int, prompt: str, through: str) -> int | None:
        """Return where turn `i` starts if the text does not contain the generation prompt.

        It is where the head of a turn ends, as a plain answer has it; or else where the turn, that head and the prompt
        begin to differ, outside of any markup.
        """
        sentinel = _sentinel(self.text)
        head, mark, _ = self._render([*self.messages[:i], Message("assistant", sentinel)]).partition(sentinel)
        if not mark:
            return None
        if through.startswith(head):
            return len(head)
        return len(_UNFINISHED_MARK.sub("", common_prefix(through, head, prompt)))

    def _by_own_text(self, i: int) -> Range | None:
        """Find a turn with tool calls or reasoning: its text without later turns, around a sentinel in the text."""
        message, rendered = self.messages[i], self._rendered_until(i)
        if rendered is None or not {"tool_calls", *KEYS_OF_REASONING} & {*message.extra}:
            return None
        turn = rendered[1][rendered[0] :]
        turn = turn[: _end(turn, message.content)]
        sentinel = _sentinel(self.text)
        parts = self._parts(i, _with_mark(message, sentinel), sentinel)
        at = self.text.find(turn, max(0, len(parts[0]) - len(turn))) if turn and len(parts) == 2 else -1
        return (at, at + len(turn)) if 0 <= at <= len(parts[0]) < at + len(turn) else None

    def _by_sentinel(self, i: int) -> Range | None:
        """Find a turn by a sentinel around its content, or around the stripped content if the template trims it."""
        message = self.messages[i]
        if _call_names(message):
            return None  # tool calls are targets too, and are outside the content
        sentinel = _sentinel(self.text)
        for content in dict.fromkeys((message.content, message.content.strip())):
            marked = message.content.replace(content, sentinel + content + sentinel, 1)
            parts = self._parts(i, replace(message, content=marked), sentinel)
            if len(parts) == 3:
                start, end = self._behind_prompt(i, len(parts[0])), len(parts[0]) + len(parts[1])
                return self._with_end((start, end))
        return None

    def _behind_prompt(self, i: int, content: int) -> int:
        """Return where the generation prompt ends, if the text has it before the content of message `i`."""
        try:
            before = self._render(self.messages[:i], add_generation_prompt=True)
        except RowError:
            return content
        return len(before) if self.text[:content].startswith(before) else content

    def _parts(self, i: int, message: Message, sentinel: str) -> list[str]:
        """Split the text at the sentinels in message `i`; return [] if they change the text between them."""
        try:
            parts = self._render((*self.messages[:i], message, *self.messages[i + 1 :])).split(sentinel)
        except RowError:
            return []
        return parts if "".join(parts) == self.text else []

    def _with_end(self, turn: Range) -> Range:
        """Extend a turn by the tokens with which the template ends an answer."""
        ends = (end for end in self._tokenizer.turn_ends if self.text.startswith(end, turn[1]))
        return turn[0], turn[1] + len(next(filter(None, ends), ""))

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self._tokenizer.render(messages, tools=self._tools, add_generation_prompt=add_generation_prompt)


def _check_names(names: Sequence[str], text: str, kind: str) -> None:
    """Raise RowError if a name is missing in the text: a template without tool support silently drops tools."""
    for name in names:
        if name not in text:
            raise RowError(f"the chat template does not write the {kind} ('{name}' is missing). {TEMPLATES_WITH_TOOLS}")


def _end(text: str, content: str) -> int:
    """Return the end of a text without the template's trailing whitespace, which is not generated.

    Whitespace at the end of the message's content stays.
    """
    at = text.rfind(content) if content.strip() else text.find(content)
    return max(len(text.rstrip()), at + len(content) if at >= 0 else 0)


def _suffix_at(text: str, start: int, turn: str, content: str) -> str:
    """Return the longest suffix of `turn` that is in the text at `start` and contains the whole content, or ""."""
    head = text[start : start + min(HEAD, max(1, len(content)))]
    at = turn.find(head) if head else -1
    while at >= 0 and content in (suffix := turn[at:]):
        if text.startswith(suffix, start):
            return suffix
        at = turn.find(head, at + 1)
    return ""


def _sentinel(text: str) -> str:
    """Return private-use characters that are not in the text; no template handles them specially."""
    number = 0
    while (sentinel := f"\ue000{number}\ue001") in text:
        number += 1
    return sentinel


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of functions, given as {"function": {"name"}} or {"name"}."""
    names = [cast(Mapping[str, Any], tool.get("function", tool)).get("name") for tool in tools]
    return [name for name in names if isinstance(name, str)]


def _call_names(message: Message) -> list[str]:
    return _tool_names(message.extra.get("tool_calls") or ())


def _with_mark(message: Message, mark: str) -> Message:
    """Return a copy with a mark before the name of the first tool call, or else before the content."""
    calls: Any = message.extra.get("tool_calls")
    if not calls:
        return replace(message, content=mark + message.content.lstrip())
    function = {**calls[0]["function"], "name": mark + calls[0]["function"]["name"]}
    return replace(message, extra={**message.extra, "tool_calls": [{**calls[0], "function": function}, *calls[1:]]})


# ----------------------------------------------------------------------------------------------------------------------
# What an assistant says in a row and the chat template leaves out, so that it is never learned.
#
# Templates drop reasoning that they do not know, cut content at `</think>`, or write a turn otherwise than the
# generation prompt will ask for it. The rows are counted by kind. Some kinds are the design of a template, and are only
# told; the loss of what a turn consists of is an error above a share of the rows (`data.on_lost_text`).

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
    parts = {CONTENT: answer, THOUGHT: before.replace("<think>", "") if end else ""}
    key = next((key for key in KEYS_OF_REASONING if message.extra.get(key) is not None), None)
    if key is not None:
        parts[key] = "\n".join(_leaves(message.extra[key]))
    lost: set[str] = set()
    for kind, text in sorted(parts.items(), key=lambda item: -len(item[1])):  # a short text may be a part of a long one
        without = _without(turn, text)
        if without is None:
            lost.add(EARLIER if is_earlier and kind != CONTENT else kind)
        else:
            turn = without
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
    """Say how many rows there are of each kind, those of `row_values.py` last."""
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
    if (needle := text.strip()) in turn:
        return turn.replace(needle, "\0", 1) if needle else turn
    needle, turn = ("".join(part.split()).casefold() for part in (text, turn))
    return turn.replace(needle, "\0", 1) if needle in turn else None


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
    ascii, plain = (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
    forms: Collection[str] = (ascii, plain, repr(text)[1:-1], escape(text), plain.replace("/", "\\/"))
    return any(form in turn for form in forms) or _without(turn, text) is not None
