"""An answer as it comes, split into what is said and the calls: text at once, a call when it closes.

What may become a call is held back until it is one, or the answer ends; then it is text. The white space before a call,
and the marks around it, belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dualtune.data.calls.notation import CallNotation, WrittenCall
from dualtune.data.calls.values import Tools

SEPARATORS = " \n,;[]"  # text of these alone, behind a call, says nothing
_BETWEEN = re.compile(r"[\s,;]*")
_WHOLE = re.compile(r"\s*(?P<call>(?:\[\s*)?(?:\{|\Z))")  # an answer that may be a call without a mark
_BLANK = re.compile(r"\s*")


class CallReader:
    """Reads the calls of one answer, in any of some notations, of which the first ones go first."""

    def __init__(self, notations: Sequence[CallNotation], tools: Tools) -> None:
        self._notations, self._tools = notations, tools
        self._marks = {mark for each in notations for mark in each.marks(tools)}
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
            if said := self._said(start, is_rest=is_end and not is_mark):
                yield said
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
        rest = self._text[at:]
        if not is_end and any(mark.startswith(rest) for mark in notation.tails):
            return False
        self._at = self._search = at
        self._open, self._is_list = None, False
        return True

    def _next_mark(self, *, is_end: bool) -> tuple[int, bool]:
        """Return where the next call begins, or else where its mark may begin; and whether it is there."""
        starts = [at for mark in self._marks if (at := self._text.find(mark, self._search)) >= 0]
        if self._num_calls == self._at == 0 and any(each.is_whole_answer for each in self._notations):
            whole = _WHOLE.match(self._text)
            starts += [whole.start("call")] if whole and whole.start("call") >= self._search else []
        if starts and min(starts) < len(self._text):
            return min(starts), True
        text = self._text[max(self._search, self._at) :]
        parts = (n for mark in self._marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
        return len(self._text) - (0 if is_end else max(parts, default=0)), False

    def _said(self, end: int, *, is_rest: bool) -> str:
        """Return what is said up to a place, and pass it on. White space waits for what follows it."""
        text = self._text[self._at : end]
        if self._is_behind_call:
            said = text.strip() if text.strip(SEPARATORS) else ""
        else:
            said = text if is_rest and not self._num_calls else text.rstrip()
        if said.strip():
            self._at, self._is_behind_call = self._at + text.index(said) + len(said), False
            return said
        return text if is_rest and not self._num_calls else ""

    def _read(self, start: int) -> tuple[WrittenCall | None, bool]:
        """Return the call that begins at a mark, or whether what is there cannot become one."""
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
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    return said, [piece for piece in pieces if isinstance(piece, WrittenCall)]
