"""Tool calls in the text of an answer: how a chat template writes them, and reading them back.

The notation is learned from what the template writes for calls that are known: the text before a call, and whether a
JSON object holds its name and its arguments, or the name stands before the arguments. So nothing is known here of
Hermes, Qwen, Llama, Mistral or DeepSeek. It is used only if it reads back what the template has written.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dualtune.data.chat.call_form import LONG_ID, NINE_ID, PROBE_ARGUMENTS, PROBE_TOOL, CallForm
from dualtune.data.chat.template_meter import TemplateLimit
from dualtune.data.sources.rows import RowError

Render = Callable[..., str]  # messages, tools=, add_generation_prompt= -> text
NAME = "probe_name"
ARGUMENT_KEYS = ("arguments", "parameters")
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "probe_question"}
_BETWEEN = re.compile(r"[\s,;]*")
_SEPARATORS = " \n,;[]"
_STRAY_END = re.compile(r"\A[^<\[]*[>\]]")  # the rest of a mark that begins before a text


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call that stands in an answer. `id` is None if the notation has none."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallNotation:
    """How a template writes calls. `read` finds them in an answer, `forced` is the beginning of one with a call."""

    written: str  # a turn with a call, as the template writes it
    opening: str  # what stands before each call; "": a call is the whole answer
    preamble: str  # what stands before the first call only
    closing: str  # what stands after each call
    ending: str  # what stands after the last call only
    between: str | None  # a pattern of what stands between name and arguments; None: both are in one JSON object
    head: str | None  # the answer up to the name of its first call; None: it cannot be begun for the model
    middle: str  # from the end of that name to the arguments

    def read(self, answer: str, names: Sequence[str] = ()) -> tuple[str, list[WrittenCall]]:
        """Return what the answer says beside its calls, and the calls; none if what stands there is not one.

        A call that is the whole answer must be of one of these functions, because any JSON could look like it.
        """
        calls: list[WrittenCall] = []
        parts: list[str] = []  # of the text, around the calls
        end = 0
        for start, stop, call in self._calls(answer):
            if not self.opening and call.name not in names:
                break
            between = answer[end:start].strip()
            parts.append(between.removeprefix(self.closing) if calls else between.removesuffix(self.preamble))
            calls.append(call)
            end = stop
        if not calls:
            return answer, []
        parts.append(answer[end:].strip().removeprefix(self.closing).lstrip().removeprefix(self.ending))
        return "".join(part for part in parts if part.strip(_SEPARATORS)).strip(), calls

    def may_begin(self, answer: str) -> bool:
        """Return whether an answer so far may be a call, if calls have no opening."""
        return not answer.strip() or answer.lstrip().startswith("{")

    def forced(self, name: str | None) -> str | None:
        """Return how an answer begins that calls this function, or any; None if that is not known."""
        if self.head is None or name is None:
            return self.head
        own_id = secrets.token_hex(5)[:9]
        return self.head + name + self.middle.replace(NINE_ID, own_id).replace(LONG_ID, f"call_{own_id}")

    def _calls(self, answer: str) -> Iterator[tuple[int, int, WrittenCall]]:
        """Yield the calls with the range of each; nothing more behind one that cannot be read."""
        at = 0
        while True:
            start = answer.find(self.opening, at)
            if start < 0:
                return
            begin = _BETWEEN.match(answer, start + len(self.opening)).end()  # pyright: ignore[reportOptionalMemberAccess]
            read = self._object(answer, begin) if self.between is None else self._named(answer, begin)
            if read is None:
                return
            at, calls = read
            for call in calls:
                yield start, at, call
                start = at
            if not self.opening:
                at = _BETWEEN.match(answer, at).end()  # pyright: ignore[reportOptionalMemberAccess]

    def _object(self, answer: str, at: int) -> tuple[int, list[WrittenCall]] | None:
        """Read JSON: a call, or a list of calls."""
        value, end = _json_at(answer, at)
        calls = [_call_of(item) for item in (cast("list[Any]", value) if isinstance(value, list) else [value])]
        return (end, [call for call in calls if call]) if calls and None not in calls else None

    def _named(self, answer: str, at: int) -> tuple[int, list[WrittenCall]] | None:
        found = re.compile(rf"(?P<name>[^\s{{}}\[\]<>()]+?)\s*{self.between}\s*(?=\{{)").match(answer, at)
        if not found:
            return None
        arguments, end = _json_at(answer, found.end())
        if not isinstance(arguments, dict):
            return None
        return end, [WrittenCall(found["name"], cast("dict[str, Any]", arguments), found.groupdict().get("id"))]


def call_notation(render: Render, form: CallForm) -> CallNotation | None:
    """Return how a template writes calls; None if it does not write tools, or calls that cannot be read back."""
    if not form.writes_calls:
        return None
    try:
        before = render([_QUESTION], tools=[PROBE_TOOL], add_generation_prompt=True)
        if NAME not in before:
            return None
        text = render(form.applied(_calling(1)), tools=[PROBE_TOOL])
        plain = render([_QUESTION, {"role": "assistant", "content": "probe_answer"}], tools=[PROBE_TOOL])
        plain_head, _, plain_tail = _turn(plain, before).partition("probe_answer")
        turn, pair = _turn(text, before), _turn(_rendered_pair(render, form), before)
    except (RowError, TemplateLimit):
        return None
    if not text.startswith(before):  # then the turns begin with the head of an answer, which is not generated
        head = _common_prefix(turn, plain_head)
        turn, pair, plain_head = (each.removeprefix(head) for each in (turn, pair, plain_head))
    notation = _learned(turn, pair, (plain_head, plain_tail), text.startswith(before))
    for text, count in ((turn, 1), (pair, pair.count(NAME))):
        if notation and count:
            calls = notation.read(text, [NAME])[1]
            if [(call.name, call.arguments) for call in calls] != [(NAME, PROBE_ARGUMENTS)] * count:
                return None
    return notation


def _turn(text: str, before: str) -> str:
    """Return the last turn of a text: what follows the generation prompt, or else the question."""
    return text[len(before) :] if text.startswith(before) else text.rpartition(cast("str", _QUESTION["content"]))[2]


def _rendered_pair(render: Render, form: CallForm) -> str:
    """Return the text of two calls in an answer; "" if the template refuses them."""
    try:
        return render(form.applied(_calling(2)), tools=[PROBE_TOOL])
    except (RowError, TemplateLimit):
        return ""


def _calling(count: int) -> list[Mapping[str, Any]]:
    call = {"type": "function", "id": NINE_ID, "function": {"name": NAME, "arguments": PROBE_ARGUMENTS}}
    return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call] * count}]


def _learned(turn: str, pair: str, plain: tuple[str, str], starts_there: bool) -> CallNotation | None:
    """Learn the notation from a turn with one call, and one with two, if there are such.

    `plain`: what stands before and after the content of another answer, which belongs to no call.
    """
    at = turn.find(NAME)
    start = next((i for i in range(at, -1, -1) if turn[i] == "{" and _call_of(_json_at(turn, i)[0])), None)
    begin = at if start is None else start
    arguments = next((i for i in range(max(at, 0), len(turn)) if _json_at(turn, i)[0] == PROBE_ARGUMENTS), None)
    if at < 0 or arguments is None:
        return None
    end = _json_at(turn, begin if start is not None else arguments)[1]
    after = turn[end:]
    after = after[: len(after) - len(_common_prefix(after[::-1], plain[1][::-1]))]
    opening, closing = turn[:begin], after
    if pair.count(NAME) == 2:
        middle = pair[end : pair.rfind(NAME) - (at - begin)]  # between the two calls
        common = _STRAY_END.sub("", _common_prefix(opening[::-1], middle[::-1])[::-1])
        if common.strip(_SEPARATORS):
            opening, closing = common, middle.removesuffix(common)
    preamble, head = turn[:begin].removesuffix(opening).strip(), plain[0].strip()
    opening = opening.strip().removesuffix("[").strip() if start is not None else opening.strip()
    if not opening and (start is None or turn[:begin].strip() not in ("", head)):
        return None
    if '"' in opening or NINE_ID in opening:  # JSON of another kind, or an id that a model would not repeat
        return None
    middle, ending = turn[at + len(NAME) : arguments], after.strip().removeprefix(closing.strip())
    return CallNotation(
        turn, opening, "" if preamble == head else preamble, _mark(closing), _mark(ending),
        None if start is not None else _pattern(middle), turn[:at] if starts_there else None, middle,
    )  # fmt: skip


def _mark(text: str) -> str:
    return text.strip() if text.strip(_SEPARATORS) else ""


def _common_prefix(first: str, second: str) -> str:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    return first[:same]


def _pattern(text: str) -> str:
    """Return a pattern for the text between name and arguments: with any id, and any white space."""
    parts = re.split(f"({LONG_ID}|{NINE_ID})", text.strip())
    id = r"(?P<id>[\w.:-]+)"
    return "".join(id if part in (LONG_ID, NINE_ID) else r"\s*".join(map(re.escape, part.split())) for part in parts)


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place, and where it ends; (None, at) if there is none."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _call_of(value: Any) -> WrittenCall | None:
    """Return the call that an object of JSON is."""
    if not isinstance(value, dict):
        return None
    table = cast("dict[str, Any]", value)
    function = cast("dict[str, Any]", table["function"]) if isinstance(table.get("function"), dict) else table
    arguments = next((function[key] for key in ARGUMENT_KEYS if key in function), None)
    if isinstance(arguments, str):
        arguments = _json_at(arguments, 0)[0]
    id, name = table.get("id"), function.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return WrittenCall(name, cast("dict[str, Any]", arguments), id if isinstance(id, str) else None)
