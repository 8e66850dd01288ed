"""Read the tool calls in an answer, in the notation of the model's chat template, which is learned by trying it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dualtune.data.chat.call_notations import (
    IN_TEXT,
    ArgumentBody,
    Body,
    CallNotation,
    NamedBody,
    ObjectBody,
    PythonBody,
    Tools,
    Value,
    WrittenCall,
    call_of,
    common_prefix,
    json_at,
)
from dualtune.data.chat.sandbox import TemplateLimit
from dualtune.data.chat.tools import LONG_ID, NINE_ID, PROBE_ARGUMENTS, PROBE_TOOL, CallForm
from dualtune.data.sources.rows import RowError

# ----------------------------------------------------------------------------------------------------------------------
# An answer as it comes, split into text and calls: text at once, a call when it closes.
#
# What may become a call is held back until it is one, or the answer ends; then it is text. The white space before a
# call, and the marks around it, belong to it.

SEPARATORS = " \n,;[]"  # text of these alone, behind a call, says nothing
_BETWEEN = re.compile(r"[\s,;]*")
_WHOLE = re.compile(r"\s*(?P<call>(?:\[\s*)?(?:\{|\Z))")  # an answer that may be a call without a mark
_BLANK = re.compile(r"\s*")


class CallReader:
    """Reads the calls of one answer, in any of some notations; earlier ones take precedence."""

    def __init__(self, notations: Sequence[CallNotation], tools: Tools) -> None:
        self._notations, self._tools = notations, tools
        self._marks = {mark for notation in notations for mark in notation.marks(tools)}
        self._text = ""
        self._at = 0  # what is before it has been passed on, or belongs to a call
        self._search = 0  # where the next call may begin
        self._open: CallNotation | None = None  # of a call that ends at `_at`, whose marks may follow
        self._is_list = False  # that call is a member of a list
        self._num_calls = 0
        self._is_behind_call = False

    def feed(self, text: str) -> list[str | WrittenCall]:
        """Return what the answer says, and its calls, as far as that is certain with this text."""
        self._text += text
        return [*self._pieces(is_end=False)]

    def end(self) -> list[str | WrittenCall]:
        """Return the rest of the answer."""
        return [*self._pieces(is_end=True)]

    def _pieces(self, *, is_end: bool) -> Iterator[str | WrittenCall]:
        while True:
            if self._open:
                following = self._next_of_list(self._open, is_end=is_end)
                if isinstance(following, WrittenCall):
                    yield following
                    continue
                if following or not self._has_passed_tails(self._open, is_end=is_end):
                    return
            start, is_mark = self._next_mark(is_end=is_end)
            if text := self._text_until(start, is_rest=is_end and not is_mark):
                yield text
            if not is_mark:
                return
            read, is_broken = self._read(start)
            if read:
                yield read
            elif is_broken or is_end:
                self._search = start + 1
            else:
                return

    def _next_of_list(self, notation: CallNotation, *, is_end: bool) -> WrittenCall | bool:
        """Return the call that follows in a list, or whether one may still come."""
        if not (self._is_list or notation.is_whole_answer):
            return False
        at = _BETWEEN.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if self._is_list and self._text.startswith("]", at):
            self._is_list, self._at = False, at + 1
            return False
        read = notation.read_next(self._text, at, self._tools)
        if read and read[1]:
            return self._taken(read[1], read[0], notation, is_list=self._is_list)
        may_come = self._is_list or at == len(self._text) or self._text[at] == "{"
        return may_come and read is None and not is_end

    def _has_passed_tails(self, notation: CallNotation, *, is_end: bool) -> bool:
        """Pass the marks behind a call. Return False if one may still come."""
        while True:
            at = _BLANK.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            tail = next((mark for mark in notation.tails if self._text.startswith(mark, at)), None)
            if tail is None:
                break
            self._at = at + len(tail)
        if not is_end and any(mark.startswith(self._text[at:]) for mark in notation.tails):
            return False
        self._at = self._search = at
        self._open, self._is_list = None, False
        return True

    def _next_mark(self, *, is_end: bool) -> tuple[int, bool]:
        """Return where the next call begins, or else where its mark may begin; and whether it is there."""
        starts = [at for mark in self._marks if (at := self._text.find(mark, self._search)) >= 0]
        if self._num_calls == self._at == 0 and any(notation.is_whole_answer for notation in self._notations):
            whole = _WHOLE.match(self._text)
            starts += [whole.start("call")] if whole and whole.start("call") >= self._search else []
        if starts and min(starts) < len(self._text):
            return min(starts), True
        text = self._text[max(self._search, self._at) :]
        parts = (n for mark in self._marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
        return len(self._text) - (0 if is_end else max(parts, default=0)), False

    def _text_until(self, end: int, *, is_rest: bool) -> str:
        """Return the text up to a place, and pass it on. White space waits for what follows it."""
        text = self._text[self._at : end]
        if self._is_behind_call:
            piece = text.strip() if text.strip(SEPARATORS) else ""
        else:
            piece = text if is_rest and not self._num_calls else text.rstrip()
        if piece.strip():
            self._at, self._is_behind_call = self._at + text.index(piece) + len(piece), False
            return piece
        return text if is_rest and not self._num_calls else ""

    def _read(self, start: int) -> tuple[WrittenCall | None, bool]:
        """Return the call that begins at a mark, or whether the text so far cannot become one."""
        is_broken = False
        for notation in self._notations:
            marks = notation.marks(self._tools)
            if not notation.is_whole_answer and not any(self._text.startswith(mark, start) for mark in marks):
                continue
            if first := notation.read_first(self._text, start, self._tools):
                (end, call), is_list = first
                if call:
                    return self._taken(call, end, notation, is_list=is_list), False
                is_broken = True
        return None, is_broken

    def _taken(self, call: WrittenCall, end: int, notation: CallNotation, *, is_list: bool) -> WrittenCall:
        self._at, self._open, self._is_list = end, notation, is_list
        self._num_calls += 1
        self._is_behind_call = True
        return call


def read_answer(answer: str, notations: Sequence[CallNotation], tools: Tools) -> tuple[str, list[WrittenCall]]:
    """Return what a whole answer says beside its calls, and the calls; none if what stands there is not one."""
    reader = CallReader(notations, tools)
    pieces = [*reader.feed(answer), *reader.end()]
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return text, [piece for piece in pieces if isinstance(piece, WrittenCall)]


# ----------------------------------------------------------------------------------------------------------------------
# How a chat template writes tool calls, learned from what it writes for calls that are known.
#
# So little is known here of Hermes, Qwen, GLM, Llama, Mistral or DeepSeek: the form of a call and the marks around it
# show in a turn with one call and in one with two. They are used only if they read back what the template has written.

Render = Callable[..., str]  # messages, tools=, add_generation_prompt= -> text
NAME = "probe_name"
_TEXTS = {"probe_first": "probe_value", "probe_second": "probe_other"}
_NUMBERS = {"probe_first": 271828, "probe_second": 314159}
_SCHEMAS = {NAME: {"probe_first": {"type": "integer"}, "probe_second": {"type": "integer"}}}
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "probe_question"}
_STRAY_END = re.compile(r"\A[^<\[]*[>\]]")  # the rest of a mark that begins before a text
_UNFINISHED = re.compile(r"[<\[][^<>\[\]]*\Z")  # the beginning of a mark that ends behind it


@dataclass(frozen=True, slots=True)
class TemplateCalls:
    """How the answers of a model with some chat template write calls: as the template does, or as their rows did."""

    own: CallNotation | None = None  # None: the template writes no calls, or some that cannot be read back
    written: str = ""  # a turn with a call, as the template writes it
    head: str | None = None  # the answer up to the name of its first call; None: it cannot be begun for the model
    middle: str = ""  # what stands behind that name whatever the arguments are
    num_common: int = 0  # characters of `head` with which any answer begins, such as an empty thought

    @property
    def notations(self) -> tuple[CallNotation, ...]:
        return (self.own, *IN_TEXT) if self.own else IN_TEXT

    def forced(self, name: str) -> str | None:
        """Return how an answer begins that calls this function; None if that is not known."""
        if self.head is None:
            return None
        own_id = secrets.token_hex(5)[:9]
        return self.head + name + self.middle.replace(NINE_ID, own_id).replace(LONG_ID, f"call_{own_id}")


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn with one call, and one with two: "" if the template refuses that."""

    one: str
    two: str
    plain: tuple[str, str]  # what stands before and after the content of another answer: it belongs to no call

    def without_tail(self, after: str) -> str:
        """Return a text without the end that it shares with what follows any answer."""
        return after[: len(after) - len(common_prefix(after[::-1], self.plain[1][::-1]))]

    def around(self, begin: int, end: int) -> tuple[str, str, str, str]:
        """Return (preamble, opening, closing, ending) of the call that stands there in the turn with one."""
        after = self.without_tail(self.one[end:])
        head = self.plain[0].strip()
        opening = before = self.one[:begin].lstrip().removeprefix(head)
        closing = after
        if self.two.count(NAME) == 2:
            middle = self.two[end : self.two.rfind(NAME) - (self.one.find(NAME) - begin)]  # between the two calls
            common = _STRAY_END.sub("", common_prefix(opening[::-1], middle[::-1])[::-1])
            if common.strip(SEPARATORS):
                opening, closing = common, middle.removesuffix(common)
        ending = after.strip().removeprefix(closing.strip())
        return before.removesuffix(opening).strip(), opening.strip(), _mark(closing), _mark(ending)


def template_calls(render: Render, form: CallForm) -> TemplateCalls | None:
    """Return how answers of a model with this template write calls; None if the template does not write tools."""
    try:
        before = render([_QUESTION], tools=[PROBE_TOOL], add_generation_prompt=True)
    except (RowError, TemplateLimit):
        return None
    if NAME not in before:
        return None
    try:
        return (_learned(render, form, before) if form.writes_calls else None) or TemplateCalls()
    except (RowError, TemplateLimit):
        return TemplateCalls()


def _learned(render: Render, form: CallForm, before: str) -> TemplateCalls | None:
    plain = render([_QUESTION, {"role": "assistant", "content": "probe_answer"}], tools=[PROBE_TOOL])
    head, _, tail = _turn(plain, before).partition("probe_answer")
    begins_there = render(form.applied(_calling(PROBE_ARGUMENTS)), tools=[PROBE_TOOL]).startswith(before)

    def written(arguments: Mapping[str, Any], count: int = 1) -> str:
        try:
            turn = _turn(render(form.applied(_calling(arguments, count)), tools=[PROBE_TOOL]), before)
        except (RowError, TemplateLimit):
            return ""
        # Without the generation prompt, turns begin with the head of an answer, which is not generated.
        return turn if begins_there else turn.removeprefix(common_prefix(turn, head))

    head = head if begins_there else ""
    turns = {count: written(PROBE_ARGUMENTS, count) for count in (1, 2)}
    texts, numbers = ({count: written(arguments, count) for count in (1, 2)} for arguments in (_TEXTS, _NUMBERS))
    checks = [
        (arguments, min(count, turn.count(NAME)), turn)
        for arguments, both in ((PROBE_ARGUMENTS, turns), (_TEXTS, texts), (_NUMBERS, numbers))
        for count, turn in both.items()
        if turn
    ]
    with_json = _with_json(_Turn(turns[1], turns[2], (head, tail)))
    for notation, middle in (
        *with_json, *_with_arguments(_Turn(texts[1], texts[2], (head, tail)), numbers[1], written({}))
    ):  # fmt: skip
        if all(_reads(notation, *check) for check in checks):
            begin = turns[1][: turns[1].find(NAME)] if begins_there else None
            return TemplateCalls(notation, turns[1], begin, middle, len(common_prefix(head, begin or "")))
    return None


def _reads(notation: CallNotation, arguments: Mapping[str, Any], count: int, turn: str) -> bool:
    schemas = {NAME: {key: {"type": "string"} for key in arguments}} if arguments is not _NUMBERS else _SCHEMAS
    calls = read_answer(turn, [notation], schemas)[1]
    return [(call.name, call.arguments) for call in calls] == [(NAME, arguments)] * count


def _turn(text: str, before: str) -> str:
    """Return the last turn of a text: what follows the generation prompt, or else the question."""
    return text[len(before) :] if text.startswith(before) else text.rpartition(cast("str", _QUESTION["content"]))[2]


def _calling(arguments: Mapping[str, Any], count: int = 1) -> list[Mapping[str, Any]]:
    call = {"type": "function", "id": NINE_ID, "function": {"name": NAME, "arguments": arguments}}
    return [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call] * count}]


def _with_json(turn: _Turn) -> Iterator[tuple[CallNotation, str]]:
    """Yield the notation, if the arguments are JSON, and what stands between the name and them."""
    at = turn.one.find(NAME)
    start = next((i for i in range(at, -1, -1) if turn.one[i] == "{" and call_of(json_at(turn.one, i)[0])), None)
    places = range(max(at, 0), len(turn.one))
    arguments = next((i for i in places if json_at(turn.one, i)[0] == PROBE_ARGUMENTS), None)
    if at < 0 or arguments is None:
        return
    begin = at if start is None else start
    end = json_at(turn.one, arguments if start is None else start)[1]
    preamble, opening, closing, ending = turn.around(begin, end)
    middle = turn.one[at + len(NAME) : arguments]
    opening = opening if start is None else opening.removesuffix("[").strip()
    body: Body = NamedBody(_pattern(middle)) if start is None else ObjectBody()
    is_readable = opening or (start is not None and turn.one[:begin].strip(" \n[") in ("", turn.plain[0].strip()))
    if is_readable and '"' not in opening and NINE_ID not in opening:  # JSON of another kind, or an id to be repeated
        yield CallNotation(body, opening, preamble, closing, ending), middle


def _with_arguments(turn: _Turn, numbers: str, empty: str) -> Iterator[tuple[CallNotation, str]]:
    """Yield the notations, if each argument stands alone, and what stands behind the name in any call."""
    text, number = _split(turn.one, _TEXTS), _split(numbers, _NUMBERS)
    if text is None or number is None:
        return
    begin = turn.one.find(NAME)
    if text["first"].strip() == "(":
        end = turn.one.rfind(")") + 1
        preamble, opening, closing, ending = turn.around(begin, end)
        marks = [re.sub(r"\[$|^\]", "", part).strip() for part in (preamble or opening, ending or closing)]
        yield CallNotation(PythonBody(), "", marks[0], "", marks[1]), "("
    preamble, opening, _, ending = turn.around(begin, len(turn.one) - len(text["after"]))
    lasts = [_last(part["after"], turn) for part in (text, number)]
    string, other = (Value(part["open"], part["next"], last) for part, last in zip((text, number), lasts, strict=True))
    bare = None
    if NAME in empty:
        behind = empty[empty.find(NAME) + len(NAME) :]
        bare = _last(behind, turn).rstrip().removesuffix(ending).rstrip()
    middle = text["first"] if bare is None else _UNFINISHED.sub("", common_prefix(text["first"], bare))
    if opening:
        yield CallNotation(ArgumentBody(text["first"], string, other, bare), opening, preamble, "", ending), middle


def _split(turn: str, arguments: Mapping[str, Any]) -> dict[str, str] | None:
    """Return what stands between the parts of a call with two arguments; None if they are written in another way."""
    (first, one), (second, two) = arguments.items()
    parts = (NAME, first, str(one), second, str(two))
    pattern = ".*?".join(f"({part})" for part in parts)
    match = re.search(pattern, turn, re.DOTALL)
    if not match:
        return None
    gaps = [turn[match.end(i) : match.start(i + 1)] for i in range(1, len(parts))]
    if gaps[1] != gaps[3]:
        return None
    return {"first": gaps[0], "open": gaps[1], "next": gaps[2], "after": turn[match.end(len(parts)) :]}


def _last(after: str, turn: _Turn) -> str:
    """Return what stands behind the last value of each call, of all that does behind that of the only one."""
    after = turn.without_tail(after)
    if turn.two.count(NAME) == 2:
        value = [*_TEXTS.values()][-1]
        middle = turn.two.rpartition(NAME)[0].rpartition(value)[2]
        shared = _UNFINISHED.sub("", common_prefix(after, middle))
        return shared if shared.strip() else after
    return after


def _mark(text: str) -> str:
    return text.strip() if text.strip(SEPARATORS) else ""


def _pattern(text: str) -> str:
    """Return a pattern for the text between name and arguments: with any id, and any white space."""
    parts = re.split(f"({LONG_ID}|{NINE_ID})", text.strip())
    id = r"(?P<id>[\w.:-]+)"
    return "".join(id if part in (LONG_ID, NINE_ID) else r"\s*".join(map(re.escape, part.split())) for part in parts)
